"""The first screen of a run: models, data, batch arithmetic, memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.accelerators import CUDAAccelerator

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.groups import PlanGroup
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.evaluation import TrainingComponents
from rlhf_lightning.app.plan import Plan, policy_config, readable
from rlhf_lightning.hparams import DPOHparams
from rlhf_lightning.models.memory import count_weights
from rlhf_lightning.rollout.generators.captured import CapturedGenerator, why_not_captured

logger = logging.getLogger(__name__)
FEW_STEPS = 30  # Adam's moments and a warm-up of 5 % mean little in fewer
SMALLEST_BATCH = 8  # of the batches that are suggested


def start_settings(
    settings: TrainSettings, parts: TrainingComponents, checkpoint: Path | None
) -> dict[str, object]:
    """Return the lines to print before the first iteration, by topic.

    Args:
        settings: settings of the run.
        parts: parts that were built from them.
        checkpoint: checkpoint that the run continues, if any.
    """
    starts = settings.artifacts.models()
    limit, iterations = settings.trainer.limit_train_batches, int(parts.data.num_iterations)
    iterations = iterations if limit is None else min(iterations, limit)
    rows = {split: len(parts.data.rows(split)) for split in ("train", "validation")}
    lines: dict[str, object] = {
        "model": _model(settings),
        "starts from": ", ".join(f"{k}: {v}" for k, v in starts.items()) or "random weights",
        "data": f"{settings.dataset.name}: {rows['train']:,} {parts.data.kind}, "
        f"{rows['validation']:,} held out",
        "batches": _batches(settings, iterations, parts.trainer.world_size),
        "learning rate": "\n".join(parts.rates),
        **_objective(settings),
        "compute": _compute(settings, parts),
        "decoding": _decoding(settings, parts),
        "memory": _planned(settings) or "rlhf-plan with the same arguments gives the peak",
        "seed": settings.seed,
        "warning": _few_steps(settings, rows["train"], iterations),
        "publishes": None if settings.paths.publish else "nothing: it stays in the run folder",
        "continues": checkpoint,
    }
    return {topic: line for topic, line in lines.items() if line not in (None, "")}


def _objective(settings: TrainSettings) -> dict[str, object]:
    """Return what is learnt from: the teacher, what scores responses, how they are sampled."""
    hparams = settings.hparams
    if isinstance(hparams, DPOHparams):
        wrong = f", {100 * hparams.label_smoothing:g} % of labels wrong"
        wrong = wrong if hparams.label_smoothing else ""
        return {"objective": f"{hparams.kind}, beta {hparams.beta:g}{wrong}"}
    scorer, sampling = settings.scorer, settings.all_hparams.get("sampling")
    if not settings.spec.rolls_out or scorer is None or sampling is None:
        return {}
    target = "" if hparams.kl_target is None else f", aims at {hparams.kl_target:g} nats a response"
    where = "" if hparams.kl_in == "reward" else f" in the loss ({hparams.kl_estimator})"
    source = scorer.get("source") or scorer.get("function") or scorer.get("url") or ""
    return {
        "teacher": settings.module.get("teacher"),
        "reward": f"{scorer.class_name} {source}".strip(),
        "rollouts": f"up to {sampling.max_new_tokens} tokens at temperature "
        f"{sampling.temperature:g}; kl_coef {hparams.kl_coef:g}{where}{target}",
    }


def _batches(settings: TrainSettings, iterations: int, world_size: int) -> str:
    """Return how the rows of an iteration become optimizer steps, in one line."""
    rows, size, micro = settings.data.num_rows, settings.data.num_generations, settings.hparams
    epochs, minibatches = settings.passes
    prompts = f" ({rows // size} prompts x {size} responses)" if size > 1 else ""
    share = f", {rows // world_size} a process" if world_size > 1 else ""
    at_once = "" if micro.micro_batch_size is None else f", {micro.micro_batch_size} at once"
    steps = epochs * minibatches
    passes = f"; {epochs} x {minibatches} minibatches of each" if settings.spec.rolls_out else ""
    unit = "pairs" if settings.sequences_per_row == 2 else "rows"
    return (
        f"{iterations} iterations of {rows} {unit}{prompts}{share}{passes}"
        f"{at_once} = {steps * iterations:,} optimizer steps"
    )


def _few_steps(settings: TrainSettings, num_rows: int, iterations: int) -> str | None:
    """Return what to change where the run makes too few optimizer steps to learn; None if enough.

    A run that is cut short on purpose (`trainer.limit_train_batches`, the debug modes) is none.
    """
    each = math.prod(settings.passes)
    if each * iterations >= FEW_STEPS or settings.trainer.limit_train_batches is not None:
        return None
    told = f"{each * iterations} optimizer steps are too few to learn much: "
    size, epochs = settings.data.batch_size, settings.data.get("num_epochs")
    if epochs is None:
        return f"{told}use data.num_iterations={-(-FEW_STEPS // each)} or more"

    def steps() -> int:
        return math.ceil(epochs * num_rows / size)

    unit = settings.batch_unit
    while steps() < FEW_STEPS and size >= 2 * SMALLEST_BATCH and not size // 2 % unit:
        size //= 2
    if steps() < FEW_STEPS:
        epochs = math.ceil(FEW_STEPS * size / num_rows)
    return f"{told}data.batch_size={size} data.num_epochs={epochs:g} makes {steps()}"


def _model(settings: TrainSettings) -> str:
    try:
        config = policy_config(settings)
    except ConfigError:  # a hub name whose shape no config carries
        return settings.model.name or "as in the checkpoint"
    size = settings.model.num_parameters or count_weights(config).total
    lora, layers = settings.lora, config.get_text_config().num_hidden_layers
    how = "every weight is trained" if lora is None else f"adapters of rank {lora.r}"
    return f"{config.model_type}, {size:,} weights, {layers} layers; {how}"


def _compute(settings: TrainSettings, parts: TrainingComponents) -> str:
    trainer = parts.trainer
    device = type(trainer.accelerator).__name__.removesuffix("Accelerator").lower()
    strategy = f", {settings.strategy.name}" if trainer.world_size > 1 else ""
    return f"{trainer.world_size} x {device}{strategy}, {settings.trainer.precision}"


def _decoding(settings: TrainSettings, parts: TrainingComponents) -> str | None:
    """Return how a GPU decodes the responses of rollouts; None where the engine has no choice."""
    engine = settings.rollout.read("rollout").call
    on_cuda = isinstance(parts.trainer.accelerator, CUDAAccelerator)
    if not (settings.spec.rolls_out and engine is CapturedGenerator and on_cuda):
        return None
    prompt = settings.data.get("max_prompt_length")
    columns = None if prompt is None else prompt + settings.all_hparams["sampling"].max_new_tokens
    try:
        reason = why_not_captured(policy_config(settings), columns)
    except ConfigError:  # a hub name whose shape no config carries
        return "captured CUDA graphs where the model allows"
    return "captured CUDA graphs" if reason is None else f"token by token: {reason}"


def memory_advice(settings: TrainSettings, overrides: Sequence[str], evaluates: bool) -> str:
    """Return the settings that need less memory, and the command that says how much.

    Args:
        settings: settings of the run.
        overrides: overrides of the command line.
        evaluates: memory ran out in the evaluation at the end.
    """
    asked = settings.evaluation if evaluates else settings.hparams
    place = "evaluation" if evaluates else f"module.{settings.stage}"
    now, length = asked.micro_batch_size, "evaluation.max_new_tokens"
    fixes = [] if now == 1 else [f"{place}.micro_batch_size={now // 2 if now else 8} (now {now})"]
    if not evaluates:
        if not settings.model.activation_checkpointing:
            fixes.append("model.activation_checkpointing=true")
        fixes += [] if settings.lora else ["lora=lora"]
        rolls_out = settings.spec.rolls_out
        length = "module.sampling.max_new_tokens" if rolls_out else "data.max_length"
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
