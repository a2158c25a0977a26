"""Read the run that a memory plan counts from training settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from rlhf_lightning.app.config.compose import ConfigError, choices, named_model
from rlhf_lightning.app.config.groups import ModelSettings, PlanGroup
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.targets import Node
from rlhf_lightning.app.memory_plan.run import (
    Evaluation,
    Run,
    Scoring,
    Shape,
    ShapeError,
    Style,
    read_shape,
)
from rlhf_lightning.app.memory_plan.sizes import parse_bytes
from rlhf_lightning.misfit import did_you_mean
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.generators.captured import CapturedGenerator
from rlhf_lightning.rollout.scorers.hparams import is_address


@dataclass(frozen=True)
class Request:
    """A run to plan, and what had to be assumed of it."""

    run: Run
    notes: tuple[str, ...]


def read_run(settings: TrainSettings, plan: PlanGroup) -> Request:
    """Return the run that the settings describe.

    Raises:
        ConfigError: if the shape of a model, or a number that matters, cannot be found.
    """
    notes: list[str] = []
    try:
        shape = policy_shape(settings)
        scoring = _scoring(settings, plan, notes)
        teacher = _teacher(settings, plan, notes, shape)
    except ShapeError as error:
        raise ConfigError(str(error)) from error
    stage, data, strategy = settings.spec, settings.data, settings.strategy
    num_devices, hparams = settings.trainer.world_size, settings.hparams
    length = data.arguments["max_prompt_length" if stage.rolls_out else "max_length"]
    sampling = settings.all_hparams.get("sampling")
    run = Run(
        spec=stage,
        title=settings.title,
        shape=shape,
        style=_style(settings),
        device=_device(settings, plan),
        strategy="ddp" if strategy.name == "auto" and num_devices > 1 else strategy.name,
        num_devices=num_devices,
        batch_size=data.num_rows,
        micro_batch_size=hparams.micro_batch_size,
        prompt_length=int(length),
        response_length=sampling.max_new_tokens if stage.rolls_out and sampling else 0,
        num_minibatches=settings.passes[1],
        num_passes=settings.passes[0],
        with_entropy=getattr(hparams, "entropy_coef", 0) > 0,
        scoring=scoring,
        teacher=teacher,
        divergence=hparams.divergence if getattr(hparams, "learns_distributions", False) else None,
        validation_rows=_validation_rows(settings),
        evaluation=_evaluation(settings),
        read_at_once=int(settings.rollout.get("prefill_tokens", Run.read_at_once)),
        optimizer=settings.optimizer.build(),
        num_generations=data.num_generations,
        shard_over=strategy.shard_over,
        served=_is_served(settings),
        objective=getattr(hparams, "kind", None),
    )
    if strategy.cpu_offload:
        notes.append("strategy.cpu_offload is counted as if nothing were offloaded")
    if strategy.gradient_sync == "step":
        notes.append("strategy.gradient_sync=step keeps 4 bytes a trained weight more in an update")
    return Request(run, (*notes, *_uncounted(settings)))


def device_bytes(run: Run, plan: PlanGroup) -> int | None:
    """Return the memory of one device, as given or as this machine has it; None if unknown.

    Raises:
        ConfigError: if what was given is no size.
    """
    given = plan.device_memory
    if given is not None:
        try:
            return parse_bytes(given)
        except ValueError as error:
            raise ConfigError(f"plan.device_memory={error}") from error
    if run.device == "cuda":
        available = torch.cuda.is_available()
        return torch.cuda.get_device_properties(0).total_memory if available else None
    # All processes of a machine share it.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // run.num_devices


def policy_shape(settings: TrainSettings) -> Shape:
    """Return the shape of the policy: of the model's config, else of the folder it starts from.

    Raises:
        ShapeError: if it is none that transformers knows.
        ConfigError: if there is none.
    """
    model, start, key = settings.model, settings.start, settings.spec.starts_from
    if model.shape is not None:
        return _completed(model)
    if start is not None and (Path(start) / "config.json").is_file():
        return read_shape(Path(start))
    named = ", ".join(name for name in choices("model") if name not in ("pretrained", "demo"))
    raise ConfigError(
        f"model={model.name or '?'} has no shape, and artifacts.{key}={start} is no local folder "
        f"with a config.json: use model=NAME (one of {named}), a folder, or model.shape"
    )


def named_shape(name: str, key: str = "plan.reward_model") -> Shape:
    """Return the shape of one of `conf/model`, or of a local folder, that `key` names.

    Raises:
        ShapeError: if the shape is none that transformers knows.
        ConfigError: if there is no such name.
    """
    if (Path(name) / "config.json").is_file():
        return read_shape(Path(name))
    model = ModelSettings.model_validate(named_model(name))
    if model.shape is None:
        known = choices("model")
        raise ConfigError(
            f"{key}={name}{did_you_mean(name, known)}: give one of conf/model that "
            f"carries a shape ({', '.join(known)}), or a local folder with a config.json"
        )
    return _completed(model)


def _completed(model: ModelSettings) -> Shape:
    """Fill in the vocabulary of a tokenizer that is made for the model."""
    fields = dict(model.shape or {})
    if fields.get("vocab_size") == "???" and model.tokenizer is not None:
        fields["vocab_size"] = len(model.tokenizer.build())
    return Shape(fields)


def _style(settings: TrainSettings) -> Style:
    dtype, lora, precision = (
        settings.strategy.compute_dtype,
        settings.lora,
        settings.trainer.precision,
    )
    return Style(
        precision=precision,
        compute_dtype=None if dtype is None else getattr(torch, dtype),
        lora=lora and replace(lora, base_precision=lora.base_precision or precision),
        activation_checkpointing=settings.model.activation_checkpointing,
        value_trainable=getattr(settings.hparams, "value_trainable", None),
    )


def _device(settings: TrainSettings, plan: PlanGroup) -> Literal["cpu", "cuda"]:
    if plan.device != "auto":
        return plan.device
    accelerator = settings.trainer.accelerator
    if accelerator == "cpu":
        return "cpu"
    given = plan.device_memory is not None
    gpu = accelerator in ("gpu", "cuda") or torch.cuda.is_available() or given
    return "cuda" if gpu else "cpu"


def _scoring(settings: TrainSettings, plan: PlanGroup, notes: list[str]) -> Scoring:
    if not settings.spec.rolls_out or settings.scorer is None:
        return Scoring()
    named = plan.reward_model
    shape = None if named is None else named_shape(named)
    found = []
    for key, node in _scorers(settings.scorer.read("scorer")):
        scoring = _one_scorer(node, shape)
        if scoring is None:
            notes.append(f"what {node.name} holds is not counted")
        else:
            new = "" if "micro_batch_size" in node.arguments else "+"  # a key that Hydra has to add
            found.append(replace(scoring, keys=(f"{new}{key}.micro_batch_size",)))
    models = [scoring for scoring in found if scoring.kind == "model"]
    adapters = [scoring for scoring in found if scoring.kind == "adapter"]
    if models and shape is None:
        which = "the" if _number(models) == 1 else "each"
        other = "(plan.reward_model=NAME: another)"
        notes.append(f"{which} reward model has the policy's shape {other}")
    if models and adapters:
        notes.append("reward adapters beside a reward model are not counted")
    alike = models or adapters
    if not alike:
        return Scoring()
    if len({replace(scoring, count=1) for scoring in alike}) > 1:
        notes.append(f"{_number(alike)} reward models that differ are counted like the largest")
    largest = max(alike, key=_size)
    keys = tuple(key for scoring in alike for key in scoring.keys)
    return replace(largest, count=_number(alike), keys=keys)


def _teacher(
    settings: TrainSettings, plan: PlanGroup, notes: list[str], policy: Shape
) -> Shape | None:
    source = settings.module.get("teacher")
    if source is None or is_address(source):
        return None
    if plan.teacher is not None:
        return named_shape(plan.teacher, "plan.teacher")
    if (Path(source) / "config.json").is_file():
        return read_shape(Path(source))
    notes.append("the teacher has the policy's shape (plan.teacher=NAME: another)")
    return policy


def _number(scorings: Sequence[Scoring]) -> int:
    return sum(scoring.count for scoring in scorings)


def _size(scoring: Scoring) -> tuple[bool, bool, int]:
    """Return what sorts reward models of one shape: fp32 weights first, then rows in a forward."""
    rows = scoring.micro_batch_size
    return scoring.dtype == torch.float32, rows is None, rows or 0


def _uncounted(settings: TrainSettings) -> Iterator[str]:
    """Yield what is not counted beside `scorer`: reward models of unknown shape, engines."""
    second = None if settings.doctor is None else settings.doctor.second_scorer
    if second is not None:
        found = [_one_scorer(node, None) for _, node in _scorers(second.read())]
        if any(scoring is None or scoring.kind != "none" for scoring in found):
            yield "doctor.second_scorer is not counted: its models are whole on every device"
    if settings.evaluation.larger_reward_model is not None and not settings.spec.trains_policy:
        yield "evaluation.larger_reward_model is not counted: it is held in the evaluation"
    if _is_served(settings):
        yield "what the servers of rollout=vllm hold is not counted"
    elif settings.rollout.read("rollout").call not in (CachedGenerator, CapturedGenerator):
        yield "generation is counted as rollout=cached does it"


def _is_served(settings: TrainSettings) -> bool:
    return getattr(settings.rollout.read("rollout").call, "sends_weights", False)


def _scorers(node: Node, key: str = "scorer") -> Iterator[tuple[str, Node]]:
    """Yield the scorers of a sum, or the only one, each with its key."""
    parts = node.arguments.get("scorers")
    if not isinstance(parts, Mapping):
        yield key, node
        return
    for name, part in parts.items():
        yield from _scorers(part, f"{key}.scorers.{name}")


def _one_scorer(node: Node, shape: Shape | None) -> Scoring | None:
    """Return the models of a scorer, None if its class does not say what it holds."""
    given, holds = node.arguments, getattr(node.call, "holds", None)
    rows = given.get("micro_batch_size")
    if getattr(node.call, "loads_no_model", False):
        return Scoring()
    if holds == "adapter":
        return Scoring("adapter", micro_batch_size=rows)
    if holds != "model":
        return None
    dtype: torch.dtype | None = torch.float32
    if given.get("dtype") == "bfloat16":
        dtype = torch.bfloat16
    if isinstance(load := given.get("load"), Node) and load.arguments.get("precision") is not None:
        dtype = None  # that of the run
    count = len(given.get("sources", [shape]))
    return Scoring("model", shape, dtype, rows, given.get("max_length"), count=count)


def _validation_rows(settings: TrainSettings) -> int:
    if settings.spec.rolls_out:
        return 0
    data, rows = settings.data, settings.data.get("validation_batch_size")
    if rows is None:
        rows = 2 * max(data.batch_size // settings.trainer.world_size, 1)
    rows = min(int(rows), int(data.get("max_validation_rows") or rows))
    return settings.spec.sequences_per_row * rows


def _evaluation(settings: TrainSettings) -> Evaluation | None:
    stage, asked = settings.spec, settings.evaluation
    count = stage.num_answered(settings)
    if not count:
        return None
    rows = min(asked.batch_size, count)
    if not stage.trains_policy:  # training prompts, dealt to all devices
        rows = -(-rows // settings.trainer.world_size)
    during = stage.rolls_out and asked.every_n_iterations is not None
    micro = asked.micro_batch_size
    return Evaluation(rows, micro, asked.max_new_tokens, during_training=during)
