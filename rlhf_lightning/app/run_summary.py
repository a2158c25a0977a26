"""The first screen of a run: models, data, batch arithmetic, memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.accelerators import CUDAAccelerator

from rlhf_lightning.app.config.groups import PlanGroup
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.evaluation import TrainingComponents
from rlhf_lightning.app.plan import Plan, readable
from rlhf_lightning.app.run_claim import nothing_to_continue
from rlhf_lightning.callbacks.wandb_logger import shown_in_wandb
from rlhf_lightning.data.summary import held_out_rows
from rlhf_lightning.hparams import DPOHparams
from rlhf_lightning.rollout.generators.captured import CapturedGenerator, why_not_captured
from rlhf_lightning.runs.folder import run_behind
from rlhf_lightning.runs.metric_catalog import counted

logger = logging.getLogger(__name__)
FEW_STEPS = 30  # Adam's moments and a warm-up of 5 % mean little in fewer


def few_steps(settings: TrainSettings, parts: TrainingComponents) -> str:
    """Return a warning of few optimizer steps, unless they are few on purpose; or ""."""
    steps = math.prod(settings.passes) * int(parts.data.num_iterations)
    if steps >= FEW_STEPS or settings.trainer.limit_train_batches is not None:
        return ""
    told = f"{counted(steps, 'optimizer step')} {'is' if steps == 1 else 'are'} too few"
    return f"{told} to learn much: use a smaller data.batch_size, or more {settings.length_key}."


def start_settings(
    settings: TrainSettings, parts: TrainingComponents, checkpoint: Path | None
) -> dict[str, object]:
    """Return the lines to print before the first iteration, by topic.

    Args:
        settings: settings of the run.
        parts: parts that were built from them.
        checkpoint: checkpoint that the run continues, if any.
    """
    plan, data = _plan(settings), parts.data
    limit, iterations = settings.trainer.limit_train_batches, int(data.num_iterations)
    iterations = iterations if limit is None else min(iterations, limit)
    steps = math.prod(settings.passes) * iterations
    own = settings.spec.starts_from
    models = settings.artifacts.models().items()
    named = {kind: run_behind(name) for kind, name in models}
    starts = ", ".join(n if kind == own else f"{kind}: {n}" for kind, n in named.items())
    trainer = parts.trainer
    device = type(trainer.accelerator).__name__.removesuffix("Accelerator").lower()
    strategy = f", {settings.strategy.name}" if trainer.world_size > 1 else ""
    lines: dict[str, object] = {
        "model": settings.model.name if plan is None else _model(settings, plan),
        "starts from": starts or "random weights",
        "data": f"{settings.dataset.name}: {len(data.rows('train')):,} {data.contents}, "
        f"{held_out_rows(data.rows('validation'))}",
        "batches": f"{_batches(settings, iterations, trainer.world_size)} = "
        f"{steps:,} optimizer steps",
        "learning rate": "\n".join(parts.rates),
        **_objective(settings),
        "compute": f"{trainer.world_size} x {device}{strategy}, {settings.trainer.precision}",
        "decoding": _decoding(settings, parts, plan),
        "memory": "rlhf-plan with the same arguments gives the peak"
        if plan is None
        else f"{readable(plan.total)}{f' of {readable(plan.memory)}' if plan.memory else ''} at "
        f"its peak ({plan.peak}), by rlhf-plan",
        "seed": settings.seed,
        "warning": few_steps(settings, parts),
        "W&B": shown_in_wandb(parts.trainer),
        "publishes": None if settings.paths.publish else "nothing: it stays in the run folder",
        "continues": checkpoint or nothing_to_continue(settings),
    }
    return {topic: line for topic, line in lines.items() if line not in (None, "")}


def _plan(settings: TrainSettings) -> Plan | None:
    """Return the memory plan of the run; None where none can be made."""
    try:
        plan = Plan(settings, PlanGroup())
        _ = plan.total
        return plan
    except Exception as problem:  # such as a hub name whose shape no config carries
        logger.warning("the plan of this run could not be made: %s", problem)
        return None


def _model(settings: TrainSettings, plan: Plan) -> str:
    layers = plan.policy.get_text_config().num_hidden_layers
    how = "every weight is trained" if plan.lora is None else f"adapters of rank {plan.lora.r}"
    size = settings.model.num_parameters or plan.counts.total
    return f"{plan.policy.model_type}, {size:,} weights, {layers} layers; {how}"


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
    """Return how the rows of an iteration are dealt, in one line."""
    rows, size, micro = settings.data.num_rows, settings.data.num_generations, settings.hparams
    epochs, minibatches = settings.passes
    prompts = f" ({rows // size} prompts x {size} responses)" if size > 1 else ""
    share = f", {rows // world_size} a process" if world_size > 1 else ""
    at_once = "" if micro.micro_batch_size is None else f", {micro.micro_batch_size} at once"
    passes = f"; {epochs} x {minibatches} minibatches of each" if settings.spec.rolls_out else ""
    unit = "pairs" if settings.sequences_per_row == 2 else "rows"
    return f"{iterations} iterations of {rows} {unit}{prompts}{share}{passes}{at_once}"


def _decoding(settings: TrainSettings, parts: TrainingComponents, plan: Plan | None) -> str | None:
    """Return how a GPU decodes the responses of rollouts; None where the engine has no choice."""
    engine = settings.rollout.read("rollout").call
    on_cuda = isinstance(parts.trainer.accelerator, CUDAAccelerator)
    if not (settings.spec.rolls_out and engine is CapturedGenerator and on_cuda):
        return None
    if plan is None:
        return "captured CUDA graphs where the model allows"
    reason = why_not_captured(plan.policy, plan.prompt + plan.response)
    return "captured CUDA graphs" if reason is None else f"token by token: {reason}"


def memory_advice(settings: TrainSettings, overrides: Sequence[str]) -> str:
    """Return the settings that need less memory, and the command that says how much.

    Args:
        settings: settings of the run.
        overrides: overrides of the command line.
    """
    length = "module.sampling.max_new_tokens" if settings.spec.rolls_out else "data.max_length"
    keys = (f"module.{settings.stage}.micro_batch_size", "evaluation.micro_batch_size", length)
    lower = ", ".join(f"{key} (now {settings.select(key)})" for key in keys)
    unused = ["lora=lora"] if settings.lora is None else []
    if not settings.model.activation_checkpointing:
        unused.append("model.activation_checkpointing=true")
    more = "".join(f", or use {word}" for word in unused)
    command = " ".join(["rlhf-plan", *overrides])
    return f"Lower {lower}{more}. What each of them saves says  {command}"
