"""State of a module in its checkpoint, and what its weights are nothing without.

That is the fingerprint of the frozen models' source, and the rank and the alpha of adapters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import lightning as L
from torch import nn

from rlhf_lightning.distributed.collectives import rank
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel

logger = logging.getLogger(__name__)
KEY = "reference_fingerprint"
ADAPTERS = "adapters"
HYPER_PARAMETERS = "hyper_parameters"  # Lightning's key in a checkpoint
# By the fingerprint of the source, by `Controls`, and with the state of the optimizer; what the
# value model starts from is of no effect later.
_COMPARED_ELSEWHERE = {"policy", "source", "revision", "value", "value_head", "temperature"}
_COMPARED_ELSEWHERE |= {"kl_coef", "learning_rate", "value_learning_rate"}


class Stateful(Protocol):
    """State that changes during a run and is no parameter."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""


def log_changed(key: str, value: object, saved: object) -> None:
    """Log that a resumed run uses another value than the checkpoint's."""
    if rank() == 0:
        logger.warning("%s=%s takes the place of the checkpoint's %s", key, value, saved)


def save_states(checkpoint: dict[str, Any], module: Any) -> None:
    """Add the fingerprint of the module's source, its adapters, and the state of each part.

    Of adapters that are rank, alpha and matrices of all on the base.
    """
    checkpoint[KEY] = module.fingerprint
    if adapters := _adapters(module.trained):
        checkpoint[ADAPTERS] = adapters
    for name, part in module.stateful().items():
        checkpoint[name] = part.state_dict()


def load_states(checkpoint: dict[str, Any], module: Any) -> None:
    """Give each part of the module its state back; say which hyper-parameters are others.

    Raises:
        ValueError: if the source, an adapter or the seed has changed since, or if the checkpoint
            lacks a part.
    """
    if (saved := checkpoint.get(KEY, "")) != module.fingerprint:
        told = f"the checkpoint was trained against reference {saved[:12]}"
        fix = "use the model it started from, of the hub by revision=COMMIT"
        raise ValueError(f"{told}, which is now {module.fingerprint[:12]}: {fix}")
    check_adapters(checkpoint, module.trained)
    for name, part in module.stateful().items():
        if name not in checkpoint:
            why = "it is from another stage or version; start again with resume=never"
            raise ValueError(f"the checkpoint has no {name}: {why}")
        part.load_state_dict(checkpoint[name])
    _compare_hyper_parameters(checkpoint, module)


def _compare_hyper_parameters(checkpoint: Mapping[str, Any], module: L.LightningModule) -> None:
    """Say with which other hyper-parameters than the checkpoint's a run is resumed.

    Those of a module that `from_pretrained` built are compared; the commands compare theirs before
    a module is built, and what `load_from_checkpoint` is given to change is asked for.

    Raises:
        ValueError: if the seed is another one.
    """
    trainer = module._trainer
    if trainer is None or trainer.state.fn != "fit":
        return
    saved, given = _flat(checkpoint.get(HYPER_PARAMETERS) or {}), _flat(module.hparams)
    for name in [name for name in given if name in saved and given[name] != saved[name]]:
        if name == "seed":
            told = f"the checkpoint was trained with seed={saved[name]}, not {given[name]}"
            raise ValueError(f"{told}: use seed={saved[name]}, or start again in another folder")
        if name.rpartition(".")[2] not in _COMPARED_ELSEWHERE:
            log_changed(name, given[name], saved[name])


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values by dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = _flat(value) if isinstance(value, Mapping) else {"": value}
        found |= {f"{name}.{key}" if key else name: item for key, item in inner.items()}
    return found


def check_adapters(checkpoint: Mapping[str, Any], model: nn.Module | None) -> None:
    """Check that adapters have the rank, alpha and matrices with which they were trained.

    Raises:
        ValueError: if one has others, or if a whole model is continued as adapters or they as one.
    """
    saved, now = checkpoint.get(ADAPTERS, {}), _adapters(model)
    if bool(saved) != bool(now) or any(saved.get(name, it) != it for name, it in now.items()):
        told = f"the checkpoint was trained with {_words(saved)}, and this run has {_words(now)}"
        raise ValueError(f"{told}: use the former (LoraHparams), or start from its export")


def _adapters(model: nn.Module | None) -> dict[str, dict[str, Any]]:
    if not isinstance(model, AdaptedPolicy | AdaptedScalarModel):
        return {}
    keys = ("r", "alpha", "target_modules")
    found = model.base.adapters.items()
    return {name: {key: getattr(lora, key) for key in keys} for name, lora in found}


def _words(adapters: Mapping[str, Mapping[str, Any]]) -> str:
    each = [
        " ".join([f"({name})", *(f"lora.{key}={value}" for key, value in lora.items())])
        for name, lora in adapters.items()
    ]
    return f"lora=lora {' '.join(each)}" if each else "lora=none"
