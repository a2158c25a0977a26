"""The first screen of a run: models, data, batch arithmetic, memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.accelerators import CUDAAccelerator

from rlhf_lightning.app.batch_arithmetic import FEW_STEPS, more_steps
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.groups import PlanGroup
from rlhf_lightning.app.config.saved import read_saved
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.plan import Plan, policy_config, readable
from rlhf_lightning.app.stages.spec import TrainingComponents
from rlhf_lightning.models.memory import count_weights
from rlhf_lightning.rollout.generators.captured import CapturedGenerator, why_not_captured
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.metric_catalog import duration
from rlhf_lightning.runs.summary import read_summary

logger = logging.getLogger(__name__)
NUM_EARLIER_RUNS = 20
CHECKPOINTING = "model.activation_checkpointing=true"


def start_settings(
    settings: TrainSettings,
    parts: TrainingComponents,
    checkpoint: Path | None,
) -> dict[str, object]:
    """Return the lines to print before the first iteration, by topic.

    Args:
        settings: settings of the run.
        parts: parts that were built from them.
        checkpoint: checkpoint that the run continues, if any.
    """
    starts = settings.artifacts.models()
    stage = settings.spec
    lines: dict[str, object] = {
        "model": _model(settings),
        "starts from": ", ".join(f"{k}: {v}" for k, v in starts.items()) or "random weights",
        "data": _data(settings, parts),
        "batches": batch_arithmetic(
            settings, _iterations(settings, parts), parts.trainer.world_size
        ),
    }
    lines["learning rate"] = "\n".join(parts.rates)
    lines |= stage.start_lines(settings)
    lines["compute"] = _compute(settings, parts)
    decoding = _decoding(settings, parts)
    if decoding is not None:
        lines["decoding"] = decoding
    lines["memory"] = _planned(settings) or "rlhf-plan with the same arguments gives the peak"
    lines["seed"] = settings.seed
    rows = {split: len(parts.data.rows(split)) for split in ("train", "validation")}
    few = few_steps(settings, rows["train"], _iterations(settings, parts))
    if few is not None:
        lines["warning"] = few
    notes = stage.start_notes(settings, rows["train"], rows["validation"])
    if notes:
        lines["note"] = "\n".join(notes)
    seconds = earlier_seconds(settings)
    if seconds is not None:
        lines["time"] = f"{duration(seconds)} the last time this configuration ran here"
    if not settings.paths.publish:
        lines["publishes"] = "nothing: the model stays in the run folder"
    if checkpoint is not None:
        lines["continues"] = checkpoint
    return lines


def batch_arithmetic(settings: TrainSettings, iterations: int, world_size: int) -> str:
    """Return how the rows of an iteration become optimizer steps, in one line."""
    rows, size = settings.data.num_rows, settings.data.num_generations
    share = f", {rows // world_size} a process" if world_size > 1 else ""
    stage = settings.spec
    epochs, minibatches = settings.passes
    at_once = _at_once(settings, rows // world_size // minibatches)
    if not stage.rolls_out:
        is_paired = stage.sequences_per_row == 2 and settings.data.get("kind") != "unpaired"
        kind = "pairs" if is_paired else "rows"
        return (
            f"{iterations} iterations of {rows} {kind}{share}{at_once} = "
            f"{count_steps(settings, iterations):,} optimizer steps"
        )
    prompts = f"{rows} prompts"
    if size > 1:
        prompts = f"{rows // size} prompts x {size} responses = {rows} rows"
    return (
        f"{iterations} iterations of {prompts}{share}; on each {epochs} x {minibatches} "
        f"minibatches of {rows // minibatches} rows{at_once} = {epochs * minibatches} optimizer "
        f"steps, {count_steps(settings, iterations):,} in all"
    )


def _at_once(settings: TrainSettings, rows: int) -> str:
    """Return how many of a process's rows of a step go through a model together."""
    key, micro = settings.spec.settings, settings.hparams.micro_batch_size
    if micro is None:
        return ""
    if micro > rows:
        return f", all at once (module.{key}.micro_batch_size={micro} is more than the {rows})"
    return f", {micro} at once"


def count_steps(settings: TrainSettings, iterations: int) -> int:
    """Return the optimizer steps of the run."""
    epochs, minibatches = settings.passes
    return epochs * minibatches * iterations


def few_steps(settings: TrainSettings, num_rows: int, iterations: int) -> str | None:
    """Return what to change where the run makes too few optimizer steps to learn; None if enough.

    A run that is cut short on purpose (`trainer.limit_train_batches`, the debug modes) is none.
    """
    steps = count_steps(settings, iterations)
    if steps >= FEW_STEPS or settings.trainer.limit_train_batches is not None:
        return None
    told = f"{steps} optimizer steps are too few to learn much"
    if settings.data.get("num_epochs") is None:
        each = max(steps // iterations, 1)
        return f"{told}: use data.num_iterations={-(-FEW_STEPS // each)} or more"
    size, epochs, more = more_steps(
        num_rows,
        settings.data.batch_size,
        settings.data.get("num_epochs"),
        unit=settings.batch_unit,
    )
    return f"{told}: data.batch_size={size} data.num_epochs={epochs:g} makes {more}"


def _iterations(settings: TrainSettings, parts: TrainingComponents) -> int:
    limit = settings.trainer.limit_train_batches
    total = int(parts.data.num_iterations)
    return total if limit is None else min(total, int(limit))


def _model(settings: TrainSettings) -> str:
    try:
        config = policy_config(settings)
    except ConfigError:  # a hub name whose shape no config carries
        return settings.model.name or "as in the checkpoint"
    size = readable_count(settings.model.num_parameters or count_weights(config).total)
    how = (
        "every weight is trained"
        if settings.lora is None
        else f"adapters of rank {settings.lora.r}"
    )
    layers = config.get_text_config().num_hidden_layers
    return f"{config.model_type}, {size} weights, {layers} layers; {how}"


def earlier_seconds(settings: TrainSettings) -> float | None:
    """Return how long the newest completed run of the same configuration took, or None.

    Runs on other devices, or under another strategy, do not count: `config_hash` leaves those out.
    """
    outputs = Path(settings.paths.outputs) / settings.name
    for path in sorted(outputs.glob("*/summary.json"), reverse=True)[:NUM_EARLIER_RUNS]:
        folder = RunFolder(path.parent)
        try:
            summary = read_summary(folder)
            if summary.status != "completed" or summary.config_hash != settings.config_hash:
                continue
            earlier = read_saved(TrainSettings, folder.config)
        except (OSError, ValueError, ConfigError):
            continue  # of a run that was killed while it wrote, or of another version
        if _placement(earlier) == _placement(settings):
            return summary.seconds.get("total")
    return None


def _placement(settings: TrainSettings) -> tuple[object, ...]:
    trainer, strategy = settings.trainer, settings.strategy
    placed = (strategy.name, strategy.cpu_offload, strategy.shard_over)
    return trainer.devices, trainer.num_nodes, *placed


def readable_count(number: int) -> str:
    """Return `135 M`, `1.24 G` or `676 k`: three digits that count."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _data(settings: TrainSettings, parts: TrainingComponents) -> str:
    counts = [len(parts.data.rows(split)) for split in ("train", "validation")]
    name = settings.dataset.name
    return f"{name}: {counts[0]:,} {parts.data.kind}, {counts[1]:,} held out"


def _compute(settings: TrainSettings, parts: TrainingComponents) -> str:
    trainer = parts.trainer
    device = type(trainer.accelerator).__name__.removesuffix("Accelerator").lower()
    where = f"{trainer.world_size} x {device}"
    if trainer.world_size > 1:
        where += f", {settings.strategy.name}"
    return f"{where}, {settings.trainer.precision}"


def _decoding(settings: TrainSettings, parts: TrainingComponents) -> str | None:
    """Return how a GPU decodes the responses of rollouts; None where the engine has no choice."""
    engine = settings.rollout.read("rollout").call
    if not settings.spec.rolls_out or engine is not CapturedGenerator:
        return None
    if not isinstance(parts.trainer.accelerator, CUDAAccelerator):
        return None
    prompt = settings.data.get("max_prompt_length")
    columns = None if prompt is None else prompt + settings.all_hparams["sampling"].max_new_tokens
    try:
        reason = why_not_captured(policy_config(settings), columns)
    except ConfigError:  # a hub name whose shape no config carries
        return "captured CUDA graphs where the model allows"
    return "captured CUDA graphs" if reason is None else f"token by token: {reason}"


def memory_advice(settings: TrainSettings, overrides: Sequence[str], *, evaluates: bool) -> str:
    """Return the settings that need less memory, and the command that says how much.

    Args:
        settings: settings of the run.
        overrides: overrides of the command line.
        evaluates: memory ran out in the evaluation at the end.
    """
    spec, asked = settings.spec, settings.evaluation if evaluates else settings.hparams
    place = "evaluation" if evaluates else f"module.{spec.settings}"
    now, length = asked.micro_batch_size, "evaluation.max_new_tokens"
    fixes = [] if now == 1 else [f"{place}.micro_batch_size={now // 2 if now else 8} (now {now})"]
    if not evaluates:
        fixes += [] if settings.model.activation_checkpointing else [CHECKPOINTING]
        fixes += [] if settings.lora else ["lora=lora"]
        length = spec.shortened_by
    fixes.append(f"{length} below {settings.select(length)}")
    planned, command = _planned(settings), " ".join(["rlhf-plan", *overrides])
    took = f" The run takes {planned}." if planned else ""
    return f"Change one of: {', '.join(fixes)}.{took} What each of them saves says  {command}"


def _planned(settings: TrainSettings) -> str:
    """Return the peak of the run by its plan, in a phrase; empty where none can be made."""
    try:
        plan = Plan(settings, PlanGroup())
        room = f" of {readable(plan.memory)}" if plan.memory else ""
        return f"{readable(plan.total)}{room} at its peak ({plan.peak}), by rlhf-plan"
    except Exception as problem:  # for want of memory, too: it must not hide what has happened
        logger.warning("the plan of this run could not be made: %s", problem)
        return ""
