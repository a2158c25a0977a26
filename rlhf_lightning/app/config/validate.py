"""What costs next to nothing is built once before anything is trained or loaded.

Ranges are checked where objects are made. Without this, a batch size of 0 or a reward function
that does not exist would be found after the stages that come first, which may be hours later.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_lightning.app.config.compose import (
    ConfigError,
    check_built,
    check_config,
    check_hparams,
    conf_dir,
    describe_interpolation,
    plain,
)
from rlhf_lightning.app.config.targets import did_you_mean
from rlhf_lightning.app.stages.spec import find_stage

BUILT = ("module", "data", "rollout", "optimizer", "scheduler")  # by `_target_`
PLAIN = ("paths", "trainer", "strategy", "logger", "callbacks", "evaluation", "model", "dataset")
TOP = ("stage", "name", "seed", "resume", "ckpt_path", "artifacts")


def check_structure(cfg: DictConfig) -> None:
    """Refuse a configuration that lacks a group or a key that every choice of it has.

    Raises:
        ConfigError: with the place, what is there, and what is wanted.
    """
    container: Any = OmegaConf.to_container(cfg, resolve=False)
    if container.get("stage") is None:
        return  # no experiment was chosen, which is said elsewhere
    for key in TOP:
        if key not in container:
            raise ConfigError(f"{key} is missing: leave it as conf/train.yaml has it, or set it")
    for group in (*BUILT, *PLAIN, "artifacts"):
        node = container.get(group)
        if not isinstance(node, Mapping):
            raise ConfigError(
                f"{group}={node!r} must be a group of settings: {group}=NAME chooses one, "
                f"{group}.KEY=VALUE changes one of its keys"
            )
        for key in sorted(_needed(group)):
            if key not in node:
                raise ConfigError(
                    f"{group}.{key} is missing: set it, or choose {group} as a whole ({group}=NAME)"
                )
    doctor = container.get("doctor")
    known = _keys(conf_dir() / "doctor" / "default.yaml") | {"thresholds"}
    for key in sorted(set(doctor) - known) if isinstance(doctor, Mapping) else ():
        raise ConfigError(
            f"doctor.{key}: doctor has no such key{did_you_mean(key, sorted(known))}; it has "
            f"{', '.join(sorted(known))}"
        )
    _check_export(container.get("export"))
    _check_nodes(container)


def _check_export(node: Any) -> None:
    known = ["auto", "fp32", "bf16"]
    for key in node if isinstance(node, Mapping) else ():
        if key != "dtype":
            raise ConfigError(f"unknown key export.{key}; it has one, export.dtype")
    dtype = node.get("dtype") if isinstance(node, Mapping) else node
    if dtype not in known:
        hint = did_you_mean(str(dtype), known)
        raise ConfigError(f"export.dtype={dtype} must be one of {', '.join(known)}{hint}")


def _check_nodes(container: Mapping[str, Any]) -> None:
    """Refuse values where something is to be built; they would be found after the training."""
    named = {f"callbacks.extra.{k}": v for k, v in _items(container["callbacks"].get("extra"))}
    gold = container["evaluation"].get("gold")
    if gold is not None:
        named["evaluation.gold"] = gold
    for where, node in named.items():
        text = isinstance(node, str) and node.startswith("${")
        if not text and not (isinstance(node, Mapping) and "_target_" in node):
            raise ConfigError(
                f"{where}={node!r} must name what is to be built: {where}._target_=package.Name"
            )


def _items(node: Any) -> list[tuple[str, Any]]:
    return [(str(key), value) for key, value in node.items()] if isinstance(node, Mapping) else []


@cache
def _needed(group: str) -> frozenset[str]:
    """Return the keys that every choice of a group has."""
    if group in BUILT:
        return frozenset({"_target_"})
    if group == "artifacts":
        return frozenset({"base", "sft", "reward", "publish"})
    files = sorted((conf_dir() / group).glob("*.yaml"))
    return frozenset.intersection(*map(_keys, files)) - {"_target_"}


def _keys(file: Path) -> frozenset[str]:
    return frozenset(str(key) for key in OmegaConf.load(file)) - {"defaults"}


def check_composed(cfg: DictConfig, trusted: tuple[str, ...] = ()) -> None:
    """Check what needs no import of torch, so that a mistake is answered at once.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    try:
        check_structure(cfg)
        check_config(cfg, trusted)
        check_hparams(cfg)
    except OmegaConfBaseException as error:  # a key that is not there, or leads nowhere
        raise ConfigError(describe_interpolation(error)) from error


def check_run(cfg: DictConfig, trusted: tuple[str, ...] = ()) -> None:
    """Check everything that can be known before a model is trained or loaded.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    check_composed(cfg, trusted)
    trial = copy.deepcopy(cfg)  # Hydra resolves what it builds, in place where a key is a reference
    check_built(trial, trusted)
    check_buildable(trial)


def check_devices(cfg: DictConfig) -> None:
    """Check that this machine has the accelerator that is asked for.

    Raises:
        ConfigError: if it has none, or fewer devices.
    """
    import torch

    kind, count = cfg.trainer.accelerator, cfg.trainer.devices
    found = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    found["gpu"] = max(found.values())
    if kind not in found:
        return
    if not found[kind]:
        raise ConfigError(
            f"trainer.accelerator={kind}, but torch finds none on this machine: use "
            "trainer.accelerator=cpu or auto, or install the driver and the build of torch for it"
        )
    if isinstance(count, int) and count > found[kind]:
        raise ConfigError(
            f"trainer.devices={count}, but torch finds {found[kind]} of kind {kind} on this "
            f"machine: use trainer.devices={found[kind]}"
        )


def check_buildable(cfg: DictConfig) -> None:
    """Build data module, optimizer and schedule once, and what is cheap of the stage.

    Nothing is read but the file of a reward function.

    Args:
        cfg: of a stage, whose names and arguments have been checked.

    Raises:
        ConfigError: with the place, what it got and what it wants.
    """
    for key, wanted in (("data.path", "file or folder of records"), ("ckpt_path", "checkpoint")):
        _check_exists(key, OmegaConf.select(cfg, key), wanted)
    for path in OmegaConf.select(cfg, "data.also") or ():
        _check_exists("data.also", path, "list of files or folders of records")
    attempt("data", cfg.data, lambda make: make(tokenizer=None))
    attempt("optimizer", cfg.optimizer, lambda make: make([_parameter()], lr=1e-3))
    attempt("scheduler", cfg.scheduler, lambda make: make())
    find_stage(cfg.stage).check_buildable(cfg)


def _check_exists(key: str, path: Any, wanted: str) -> None:
    if path is not None and not Path(str(path)).exists():
        raise ConfigError(f"{key}={path} does not exist: give a {wanted}")


def attempt(where: str, node: DictConfig, call: Callable[[Any], object]) -> None:
    """Build `node` and call what it makes.

    Raises:
        ConfigError: with the place, and the key that was refused.
    """
    try:
        call(instantiate(node, _partial_=True))
    except (InstantiationException, ValueError, TypeError, RuntimeError, OSError) as error:
        raise ConfigError(_described(where, node, error)) from error


def _described(where: str, node: DictConfig, error: BaseException) -> str:
    """Return the message with the key as the user writes it."""
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    values = {key: value for key, value in plain(node).items() if not key.startswith("_")}
    name = next((key for key in values if text.startswith((f"{key}=", f"{key} is "))), None)
    if name is not None:
        return f"{where}.{text}"
    if where in text:
        return text
    given = ", ".join(f"{key}={value}" for key, value in values.items())
    return f"{where}: {text} (given: {given})"


def _parameter() -> Any:
    import torch

    return torch.nn.Parameter(torch.zeros(1))
