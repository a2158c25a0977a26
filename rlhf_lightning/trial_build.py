"""What costs next to nothing is built once before anything is trained or loaded.

Ranges are checked where objects are made. Without this, a batch size of 0 or a reward function
that does not exist would be found after the stages that come first, which may be hours later.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_lightning.composition import (
    ConfigError,
    check_built,
    check_config,
    check_hparams,
    describe_interpolation,
    plain,
)
from rlhf_lightning.structure import check_structure

# Scorers whose constructors load no model.
LIGHT_SCORERS = frozenset(
    {
        "rlhf_lightning.rollout.score.FunctionScorer",
        "rlhf_lightning.rollout.score.WeightedScorer",
        "rlhf_lightning.rollout.score_http.HttpScorer",
    }
)


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
    """Build data module, optimizer, schedule and sample log once, and a scorer without a model.

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
    _attempt("data", cfg.data, lambda make: make(tokenizer=None))
    _attempt("optimizer", cfg.optimizer, lambda make: make([_parameter()], lr=1e-3))
    _attempt("scheduler", cfg.scheduler, lambda make: make())
    if cfg.stage != "ppo":
        return
    if set(_targets(plain(cfg.scorer))) <= LIGHT_SCORERS:
        _attempt("scorer", cfg.scorer, lambda make: make())
    for name, value in plain(cfg.callbacks.samples).items():
        if value < 1:
            raise ConfigError(f"callbacks.samples.{name}={value} must be at least 1")


def _check_exists(key: str, path: Any, wanted: str) -> None:
    if path is not None and not Path(str(path)).exists():
        raise ConfigError(f"{key}={path} does not exist: give a {wanted}")


def _attempt(where: str, node: DictConfig, call: Callable[[Any], object]) -> None:
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


def _targets(node: Any) -> list[str]:
    if isinstance(node, Mapping):
        own = [str(node["_target_"])] if "_target_" in node else []
        return own + [target for value in node.values() for target in _targets(value)]
    if isinstance(node, list):
        return [target for value in node for target in _targets(value)]
    return []
