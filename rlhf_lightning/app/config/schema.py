"""Settings of a stage that are no hyper-parameters: their types, their ranges, and their names.

Light on purpose: no torch, so that a mistake is answered at once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rlhf_lightning.app.config.targets import TargetError, did_you_mean
from rlhf_lightning.app.stages.spec import find_stage
from rlhf_lightning.hparams import Checked, number
from rlhf_lightning.runs.stopping import deadline

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class TopSettings(Checked):
    """The keys at the top of a configuration."""

    seed: int = number(1, at_least=0, at_most=LARGEST_SEED)
    resume: str = "never"
    name: str = ""
    ckpt_path: str | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        _choose(self, "resume", ("never", "auto"))


@dataclass(frozen=True)
class TrainerSettings(Checked):
    """What `lightning.Trainer` is given."""

    accelerator: str = "auto"
    devices: int = number(1, at_least=1)
    num_nodes: int = number(1, at_least=1)
    precision: str = "32-true"
    validations: int = number(4, at_least=0)
    limit_train_batches: int | None = number(None, at_least=1)
    limit_val_batches: int | None = number(None, at_least=1)

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        _choose(self, "accelerator", ("auto", "cpu", "gpu", "cuda", "mps"))
        # Trained weights in 16 bits lose the small updates of RLHF; fp16 would need a loss scaler.
        _choose(self, "precision", ("32-true", "bf16-mixed"))


@dataclass(frozen=True)
class EvaluationSettings(Checked):
    """The comparison at the end, and during PPO; `gold` is built by name."""

    num_prompts: int = number(512, at_least=1)
    answers_per_prompt: int = number(1, at_least=1)
    batch_size: int = number(128, at_least=1)
    micro_batch_size: int | None = number(None, at_least=1)
    temperature: float = number(1.0, at_least=0, at_most=10)
    max_new_tokens: int = number(64, at_least=1)
    num_samples: int = number(24, at_least=0)
    every_n_iterations: int | None = number(None, at_least=1)
    during_training: int = number(128, at_least=1)
    larger_reward_model: str | None = None


@dataclass(frozen=True)
class StrategySettings(Checked):
    """How models are placed on devices, and how long ranks wait for each other."""

    name: str = "auto"
    compute_dtype: str | None = None
    timeout_minutes: float = number(30.0, above=0)
    checkpoint: str = "full"
    shard_over: int | None = number(None, at_least=1)
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        _choose(self, "name", ("auto", "ddp", "fsdp"))
        _choose(self, "compute_dtype", (None, "bfloat16", "float32"))
        _choose(self, "checkpoint", ("full", "sharded"))


@dataclass(frozen=True)
class LoggerSettings(Checked):
    """Who else is told of the metrics."""

    kind: str = "none"
    project: str = "rlhf_lightning"
    group: str | None = None
    mode: str = "auto"

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        _choose(self, "kind", ("none", "csv", "tensorboard", "wandb"))
        _choose(self, "mode", ("auto", "online", "offline", "disabled"))
        if not self.project or set(self.project) & set("/\\#?%:") or ".." in self.project:
            raise ValueError(
                f"LoggerSettings.project={self.project!r} must be a name without / \\ # ? % : or .."
            )


@dataclass(frozen=True)
class CheckpointSettings(Checked):
    """When checkpoints are written, and which are kept."""

    every_n_iterations: int | None = number(10, at_least=1)
    every_minutes: float | None = number(None, above=0)
    must_save_by: str | None = None
    keep_last: int = number(2, at_least=1)
    monitor: str | None = None
    mode: str = "min"

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        _choose(self, "mode", ("min", "max"))
        if self.must_save_by is not None:
            try:
                deadline(self.must_save_by, started=time.time())
            except ValueError as error:
                raise ValueError(f"CheckpointSettings.must_save_by={error}") from error


@dataclass(frozen=True)
class EarlyStoppingSettings(Checked):
    """When SFT or reward training ends early."""

    patience: int = number(3, at_least=1)
    min_delta: float = number(0.0, at_least=0)


@dataclass(frozen=True)
class PathsSettings(Checked):
    """Where runs and models are kept, and whether a run publishes its model."""

    outputs: str = "outputs"
    artifacts: str = "artifacts"
    publish: bool = True

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        for name in ("outputs", "artifacts"):
            if not getattr(self, name).strip():
                raise ValueError(f"PathsSettings.{name}='' must be a folder, such as outputs")


SECTIONS: dict[str, type[Checked]] = {
    "paths": PathsSettings,
    "trainer": TrainerSettings,
    "evaluation": EvaluationSettings,
    "strategy": StrategySettings,
    "logger": LoggerSettings,
}
TOP = ("seed", "resume", "name", "ckpt_path")


def check_settings(container: Mapping[str, Any]) -> None:
    """Check types, ranges and choices of what is no hyper-parameter.

    Args:
        container: the configuration as plain dicts and lists, interpolations resolved.

    Raises:
        ValueError: with the key, what it got and what it wants.
    """
    build_checked(TopSettings, {k: container[k] for k in TOP if k in container}, "")
    for section, settings in SECTIONS.items():
        values = container.get(section)
        if not isinstance(values, Mapping):
            raise ValueError(f"{section}={values!r} must be a group of settings: leave it out")
        names = {item.name for item in fields(settings)}  # type: ignore[arg-type]
        known = {k: v for k, v in values.items() if k in names}
        for key, value in known.items():
            if value == "???":
                raise ValueError(f"{section}.{key} is not set: add {section}.{key}=...")
        build_checked(settings, known, section)
    _check_groups(container)
    _check_callbacks(container)
    data = container["data"]
    if data.get("num_iterations") is None and data.get("num_epochs") is None:
        raise ValueError(
            f"data.num_iterations=None and num_epochs={data.get('num_epochs')}: give exactly one"
        )
    tags = container["logger"].get("tags", [])
    if not isinstance(tags, list) or any(not isinstance(tag, str) for tag in tags):
        raise ValueError(f"logger.tags={tags!r} must be a list of texts, such as [first,tiny]")
    for key in ("base", "sft", "reward", "ppo", "publish"):
        value = container["artifacts"].get(key)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"artifacts.{key}={value!r} must be a folder or a hub name, or null")
    _check_path_name("name", container.get("name"))
    dataset = container.get("dataset")
    if isinstance(dataset, Mapping):
        _check_path_name("dataset.name", dataset.get("name"))


def _check_groups(container: Mapping[str, Any]) -> None:
    group = container["strategy"].get("shard_over")
    devices = container["trainer"]["devices"] * container["trainer"]["num_nodes"]
    if group is not None and devices % group:
        raise ValueError(
            f"strategy.shard_over={group} must divide the {devices} devices (trainer.devices times "
            "trainer.num_nodes): each group of so many neighbours holds one copy of every model"
        )


def _check_callbacks(container: Mapping[str, Any]) -> None:
    callbacks = container["callbacks"]
    for key in ("checkpoint", "samples", "extra"):
        if not isinstance(callbacks.get(key), Mapping):
            raise ValueError(
                f"callbacks.{key}={callbacks.get(key)!r} must be a group of settings: set the keys "
                f"in it, as conf/callbacks/default.yaml has them"
            )
    build_checked(CheckpointSettings, callbacks["checkpoint"], "callbacks.checkpoint")
    early = callbacks.get("early_stopping")
    if early is None:
        return
    if not isinstance(early, Mapping):
        raise ValueError(f"callbacks.early_stopping={early!r} must be null or {{patience: 2}}")
    stage = find_stage(container["stage"])
    if not stage.validates:
        raise ValueError(
            f"callbacks.early_stopping={dict(early)} stops SFT and reward training by val/loss, "
            f"which {stage.title} does not have: leave it null"
        )
    known = {item.name for item in fields(EarlyStoppingSettings)}
    build_checked(
        EarlyStoppingSettings,
        {k: v for k, v in early.items() if k in known},
        "callbacks.early_stopping",
    )


def build_checked(cls: type[Checked], values: Mapping[str, Any], where: str) -> Checked:
    """Return `cls(**values)`; an error names the key as the user writes it.

    Args:
        cls: a dataclass that checks itself.
        values: its fields.
        where: the place of the group, "" at the top.

    Raises:
        ValueError: for an unknown key, another type, or a value that is impossible.
    """
    known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    for key in values:
        if key not in known:
            raise TargetError(f"unknown key {prefix}{key}{did_you_mean(str(key), known)}")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(str(error).replace(f"{cls.__name__}.", prefix)) from error


def check_path_name(value: object) -> str:
    """Return a text that is to name one folder, unless it would name another one.

    Raises:
        ValueError: if it has separators, begins with a dot, or holds what a shell would change.
    """
    text = str(value)
    if not NAME.fullmatch(text) or ".." in text or len(text) > 100:
        raise ValueError(
            f"{text!r} becomes the name of a folder: use letters, digits and _ . + - (no / and no "
            ".., at most 100)"
        )
    return text


def _check_path_name(key: str, value: object) -> None:
    if value is None or value == "???":
        raise ValueError(f"{key} is not set: add {key}=...")
    try:
        check_path_name(value)
    except ValueError as error:
        raise ValueError(f"{key}={error}") from error


def _choose(settings: Checked, name: str, allowed: tuple[str | None, ...]) -> None:
    value = getattr(settings, name)
    if value not in allowed:
        words = ", ".join("null" if item is None else item for item in allowed)
        hint = did_you_mean(str(value), [str(item) for item in allowed])
        raise ValueError(f"{type(settings).__name__}.{name}={value} must be one of {words}{hint}")
