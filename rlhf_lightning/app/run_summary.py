"""What the first screen of a run says: models, data, batch arithmetic, what will be measured."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import DictConfig
from transformers import AutoModelForCausalLM

from rlhf_lightning.app.batch_arithmetic import FEW_STEPS, batch_unit, more_steps
from rlhf_lightning.app.config.compose import ConfigError, plain
from rlhf_lightning.app.memory_plan.request import policy_shape
from rlhf_lightning.app.memory_plan.run import Shape, ShapeError
from rlhf_lightning.app.memory_plan.sizes import readable
from rlhf_lightning.app.stages.spec import Parts, find_stage
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.metric_catalog import duration
from rlhf_lightning.runs.summary import read_summary

NUM_EARLIER_RUNS = 20
# A weight, its gradient and two moments of Adam, four bytes each.
BYTES_TRAINED = 16


def start_settings(
    cfg: DictConfig, parts: Parts, checkpoint: Path | None, config_hash: str | None
) -> dict[str, object]:
    """Return what to print before the first iteration, by topic.

    Args:
        cfg: of the run.
        parts: what was built of it.
        checkpoint: that the run continues, if any.
        config_hash: of the run; an earlier run that has the same says how long it takes.
    """
    starts = {k: v for k, v in cfg.artifacts.items() if v is not None and k != "publish"}
    stage = find_stage(cfg.stage)
    settings: dict[str, object] = {
        "model": _model(cfg),
        "starts from": ", ".join(f"{k}: {v}" for k, v in starts.items()) or "random weights",
        "data": _data(cfg, parts),
        "batches": batch_arithmetic(cfg, _iterations(cfg, parts), parts.trainer.world_size),
    }
    settings["learning rate"] = "\n".join(parts.rates)
    settings |= stage.start_lines(cfg)
    settings["compute"] = _compute(cfg, parts)
    settings["memory"] = _memory(cfg)
    settings["seed"] = cfg.seed
    rows = {split: len(parts.data.rows(split)) for split in ("train", "validation")}
    few = few_steps(cfg, rows["train"], _iterations(cfg, parts))
    if few is not None:
        settings["warning"] = few
    notes = stage.start_notes(cfg, rows["train"], rows["validation"])
    if notes:
        settings["note"] = "\n".join(notes)
    seconds = earlier_seconds(Path(cfg.paths.outputs) / cfg.name, config_hash)
    if seconds is not None:
        settings["time"] = f"{duration(seconds)} the last time this configuration ran here"
    if not cfg.paths.publish:
        settings["publishes"] = "nothing: the model stays in the run folder"
    if checkpoint is not None:
        settings["continues"] = checkpoint
    return settings


def batch_arithmetic(cfg: DictConfig, iterations: int, world_size: int) -> str:
    """Return how the rows of an iteration become optimizer steps, in one line."""
    rows = int(cfg.data.batch_size)
    share = f", {rows // world_size} a process" if world_size > 1 else ""
    stage = find_stage(cfg.stage)
    epochs, minibatches = _passes(cfg)
    at_once = _at_once(cfg, rows // world_size // minibatches)
    if stage.minibatches is None:
        return (
            f"{iterations} iterations of {rows} {stage.rows}{share}{at_once} = "
            f"{count_steps(cfg, iterations):,} optimizer steps"
        )
    return (
        f"{iterations} iterations of {rows} prompts{share}; on each {epochs} x {minibatches} "
        f"minibatches of {rows // minibatches} rows{at_once} = {epochs * minibatches} optimizer "
        f"steps, {count_steps(cfg, iterations):,} in all"
    )


def _passes(cfg: DictConfig) -> tuple[int, int]:
    """Return how often the rows of an iteration are gone through, in how many minibatches."""
    stage = find_stage(cfg.stage)
    if stage.minibatches is None:
        return 1, 1
    settings = cfg.module[stage.settings]
    return int(settings[stage.minibatches.epochs]), int(settings[stage.minibatches.count])


def _at_once(cfg: DictConfig, rows: int) -> str:
    """Return how many of a process's rows of a step go through a model together."""
    settings = find_stage(cfg.stage).settings
    micro = cfg.module[settings].micro_batch_size
    if micro is None:
        return ""
    if micro > rows:
        return f", all at once (module.{settings}.micro_batch_size={micro} is more than the {rows})"
    return f", {micro} at once"


def count_steps(cfg: DictConfig, iterations: int) -> int:
    """Return the optimizer steps of the run."""
    epochs, minibatches = _passes(cfg)
    return epochs * minibatches * iterations


def few_steps(cfg: DictConfig, num_rows: int, iterations: int) -> str | None:
    """Return what to change where the run makes too few optimizer steps to learn; None if enough.

    A run that is cut short on purpose (`trainer.limit_train_batches`, the debug modes) is none.
    """
    steps = count_steps(cfg, iterations)
    if steps >= FEW_STEPS or cfg.trainer.limit_train_batches is not None:
        return None
    told = f"{steps} optimizer steps are too few to learn much"
    if cfg.data.get("num_epochs") is None:
        each = max(steps // iterations, 1)
        return f"{told}: use data.num_iterations={-(-FEW_STEPS // each)} or more"
    size, epochs, more = more_steps(
        num_rows, int(cfg.data.batch_size), cfg.data.num_epochs, unit=batch_unit(plain(cfg))
    )
    return f"{told}: data.batch_size={size} data.num_epochs={epochs:g} makes {more}"


def _iterations(cfg: DictConfig, parts: Parts) -> int:
    limit = cfg.trainer.limit_train_batches
    total = int(parts.data.num_iterations)
    return total if limit is None else min(total, int(limit))


def _model(cfg: DictConfig) -> str:
    try:
        shape: Shape = policy_shape(cfg)
    except (ConfigError, ShapeError):  # a hub name whose shape no config carries
        return str(cfg.model.get("name", "as in the checkpoint"))
    name = shape.config().model_type
    size = readable_count(cfg.model.get("num_parameters") or count_parameters(shape))
    how = "every weight is trained" if cfg.lora is None else f"adapters of rank {cfg.lora.r}"
    return f"{name}, {size} weights, {shape.num_layers} layers; {how}"


def count_parameters(shape: Shape) -> int:
    """Return the weights of a causal language model of this shape; nothing is allocated."""

    def count(num_layers: int) -> int:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape.config(num_layers))
        return sum(parameter.numel() for parameter in model.parameters())

    layers = shape.num_layers
    if layers < 3:
        return count(layers)
    return count(1) + (layers - 1) * (count(2) - count(1))


def earlier_seconds(outputs: Path, config_hash: str | None) -> float | None:
    """Return how long the newest completed run of the same configuration took, or None."""
    for path in sorted(outputs.glob("*/summary.json"), reverse=True)[:NUM_EARLIER_RUNS]:
        try:
            summary = read_summary(RunFolder(path.parent))
        except (OSError, ValueError):
            continue  # of a run that was killed while it wrote
        if summary.status == "completed" and summary.config_hash == config_hash:
            return summary.seconds.get("total")
    return None


def readable_count(number: int) -> str:
    """Return `135 M`, `1.24 G` or `676 k`: three digits that count."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _memory(cfg: DictConfig) -> str:
    """Return what is there in any case; activations are for the plan, which takes seconds."""
    peak = "rlhf-plan with the same arguments gives the peak"
    try:
        shape = policy_shape(cfg)
    except (ConfigError, ShapeError):
        return peak
    if cfg.lora is not None or cfg.strategy.name == "fsdp":
        return peak
    weights = cfg.model.get("num_parameters") or count_parameters(shape)
    trained = len(find_stage(cfg.stage).trains)
    size = readable(trained * weights * BYTES_TRAINED)
    return f"{size} of fp32 weights, gradients and Adam state on a device; {peak}"


def _data(cfg: DictConfig, parts: Parts) -> str:
    counts = [len(parts.data.rows(split)) for split in ("train", "validation")]
    name = cfg.dataset.name if cfg.dataset is not None else type(parts.data.source).__name__
    return f"{name}: {counts[0]:,} {parts.data.kind}, {counts[1]:,} held out"


def _compute(cfg: DictConfig, parts: Parts) -> str:
    trainer = parts.trainer
    device = type(trainer.accelerator).__name__.removesuffix("Accelerator").lower()
    where = f"{trainer.world_size} x {device}"
    if trainer.world_size > 1:
        where += f", {cfg.strategy.name}"
    return f"{where}, {cfg.trainer.precision}"
