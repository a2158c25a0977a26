"""Configuration: where it lies, its defaults, and what of it is refused.

Light on purpose: no torch, so that `--help` and a config error answer at once.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_lightning.app.batch_arithmetic import check_batch_divides
from rlhf_lightning.app.config.schema import build_checked, check_path_name, check_settings
from rlhf_lightning.app.config.targets import (
    TargetError,
    check_arguments,
    check_names,
    check_targets,
    did_you_mean,
    listed,
    resolve,
)
from rlhf_lightning.app.stages.spec import StageError, find_stage, stage_names
from rlhf_lightning.distributed.launch import launch_time
from rlhf_lightning.doctor.interventions import ActionSettings
from rlhf_lightning.doctor.thresholds import DoctorThresholds
from rlhf_lightning.evaluation.gates import gate_problem
from rlhf_lightning.hparams import LoraHparams

HPARAMS: dict[str, Any] = {
    "doctor": DoctorThresholds,
    "doctor_actions": ActionSettings,
    "lora": LoraHparams,
    **{key: cls for stage in stage_names() for key, cls in find_stage(stage).hparams.items()},
}
# Groups that are read key by key; what is built by name is held against its signature.
PLAIN_GROUPS = (
    "artifacts",
    "callbacks",
    "dataset",
    "evaluation",
    "logger",
    "model",
    "paths",
    "strategy",
    "trainer",
)
BUILT_IN_CALLBACKS = {
    "callbacks.checkpoint": "rlhf_lightning.callbacks.checkpointing.IterationCheckpoint",
    "callbacks.samples": "rlhf_lightning.callbacks.samples.SampleLog",
    "callbacks.early_stopping": "lightning.pytorch.callbacks.EarlyStopping",
}
HPARAMS_BY_NAME = {cls.__name__: cls for cls in HPARAMS.values()}


class ConfigError(Exception):
    """The configuration asks for something that does not exist or is not allowed."""


def conf_dir() -> Path:
    """Return the folder of configurations: inside the package in a wheel, else beside it."""
    here = Path(__file__).resolve().parents[2]
    for folder in (here / "conf", here.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no conf/train.yaml in {here} or beside it: the package is incomplete")


def register() -> None:
    """Make hyper-parameter defaults and `sweeps/` known to Hydra; call before composing.

    Defaults live once, in `hparams.py`: this turns them into the config group `hparams`.
    """
    sweeps = f"file://{conf_dir().parent}"
    OmegaConf.register_new_resolver("rlhf_sweeps", lambda: sweeps, replace=True)
    OmegaConf.register_new_resolver("rlhf_now", launch_time, replace=True)
    OmegaConf.register_new_resolver("rlhf_name", check_path_name, replace=True)
    store = ConfigStore.instance()
    for name, cls in HPARAMS.items():
        defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
        target = f"{cls.__module__}.{cls.__qualname__}"
        store.store(group="hparams", name=name, node={"_target_": target, **defaults})


def check_config(cfg: DictConfig, extra_targets: tuple[str, ...] = ()) -> None:
    """Refuse unknown top-level keys, a missing experiment and targets off the allowlist.

    Raises:
        ConfigError: with what was found and what to write.
    """
    groups = [next(iter(item)) for item in _primary()["defaults"] if isinstance(item, dict)]
    known = [str(k) for k in (*_primary(), *groups) if k not in ("defaults", "hydra")]
    for key in map(str, cfg):
        if key not in known:
            more = ["experiment", "preset", "sweeps"]
            raise ConfigError(
                f"unknown top-level key {key!r}{did_you_mean(key, known + more)} "
                f"(+experiment=, +preset= and +sweeps= take what stands in conf/ and sweeps/: "
                f"{listed(choices('experiment'))})"
            )
    try:
        find_stage(cfg.stage)
    except StageError as error:
        if "." in str(cfg.stage):
            raise ConfigError(str(error)) from error
        raise ConfigError(
            f"stage={cfg.stage}: choose what to train with +experiment=NAME, one of "
            f"{listed(choices('experiment'))}"
        ) from error
    _check_keys(cfg)
    check_gates_config(cfg)
    try:
        check_names(OmegaConf.to_container(cfg, resolve=False), extra_targets)
    except TargetError as error:
        raise ConfigError(str(error)) from error


def check_built(cfg: DictConfig, extra_targets: tuple[str, ...] = ()) -> None:
    """Look up everything that `cfg` builds by name and hold its arguments against it.

    It imports what is named, and torch with it.

    Raises:
        ConfigError: with the place, what it got and what it wants.
    """
    container = plain(cfg)
    # What others refer to comes first, so that an error names the place where it is written.
    first = {key: container.pop(key) for key in ("dataset", "model", "lora") if key in container}
    try:
        check_targets(first | container, extra_targets)
        for key, name in BUILT_IN_CALLBACKS.items():
            values = OmegaConf.select(cfg, key)
            if values is not None:
                found = resolve(name, key)
                check_arguments(found, plain(values), key)
    except TargetError as error:
        raise ConfigError(str(error)) from error


def plain(node: DictConfig) -> dict[str, Any]:
    """Return the node as plain dicts and lists, interpolations resolved.

    Raises:
        ConfigError: if an interpolation leads nowhere, or to a key that is not set.
    """
    try:
        return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))
    except OmegaConfBaseException as error:
        raise ConfigError(describe_interpolation(error)) from error


def describe_interpolation(error: OmegaConfBaseException) -> str:
    """Return in one line which key is not set, or which one cannot be resolved."""
    text = str(error).strip().splitlines()[0]
    missing = re.search(r"Missing mandatory value: ([\w.]+)", text)
    if missing:
        return f"{missing.group(1)} is not set: add {missing.group(1)}=..."
    if "not in struct" in text or "Missing key" in text:
        return f"{error.full_key} is missing: set it, or choose its group as a whole (GROUP=NAME)"
    return f"{error.full_key}: {text}" if error.full_key else text


def check_hparams(cfg: DictConfig) -> None:
    """Build the hyper-parameters of the stage, so that a wrong one fails before anything runs.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    stage = find_stage(cfg.stage)
    _check_module(cfg, stage.settings)
    container = plain(cfg)
    module: dict[str, Any] = container["module"] or {}
    nodes = {"lora": container["lora"]} | {f"module.{key}": node for key, node in module.items()}
    doctor: dict[str, Any] = container["doctor"] or {}
    nodes |= {f"doctor.{key}": doctor.get(key) for key in ("thresholds", "actions")}
    known = HPARAMS_BY_NAME | {cls.__name__: cls for cls in stage.hparams.values()}
    try:
        check_settings(container)
        for where, node in nodes.items():
            target = str(node.get("_target_", "")) if isinstance(node, dict) else ""
            if target.rpartition(".")[2] in known:
                values = {k: v for k, v in node.items() if k != "_target_"}
                build_checked(known[target.rpartition(".")[2]], values, where)
        check_batch_divides(container)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    stage.check(cfg)


def _check_module(cfg: DictConfig, settings: str) -> None:
    module = cfg.get("module")
    if OmegaConf.select(cfg, f"module.{settings}._target_") is None:
        name = str(module.get("_target_")) if isinstance(module, DictConfig) else str(module)
        raise ConfigError(
            f"stage={cfg.stage} needs the settings module.{settings}, and module is {name}: "
            f"use module={settings}, or the experiment of another stage"
        )


def choices(group: str) -> list[str]:
    """Return the names of a config group."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


@cache
def _primary() -> dict[Any, Any]:
    return cast(Any, OmegaConf.to_container(OmegaConf.load(conf_dir() / "train.yaml")))


def check_gates_config(cfg: DictConfig) -> None:
    """Refuse gates that are none; imports nothing heavy.

    Raises:
        ConfigError: with the gate and what is wrong with it.
    """
    for name, gate in (cfg.gates or {}).items():
        values = OmegaConf.to_container(gate) if isinstance(gate, DictConfig) else gate
        problem = gate_problem(values)
        if problem:
            raise ConfigError(f"gates.{name}={values} {problem}")


def _check_keys(cfg: DictConfig) -> None:
    """Refuse keys that nothing reads: they would change nothing, in silence."""
    written = OmegaConf.to_container(cfg, resolve=False)
    text = repr(written)
    for group in PLAIN_GROUPS:
        node = written.get(group) if isinstance(written, dict) else None
        if not isinstance(node, dict):
            continue
        known = _known_keys(group)
        for key in node:
            if key not in known and f"${{{group}.{key}" not in text:
                names = [f"{group}.{name}" for name in sorted(known)]
                hint = did_you_mean(f"{group}.{key}", names)
                raise ConfigError(f"unknown key {group}.{key}{hint}")


@cache
def _known_keys(group: str) -> frozenset[str]:
    files = map(OmegaConf.load, (conf_dir() / group).glob("*.yaml"))
    return frozenset(map(str, chain(_primary().get(group) or (), *files)))
