"""Placement of a module's models: sharded where ranks share them, else moved to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from rlhf_lightning.distributed.collectives import shard
from rlhf_lightning.models.precision import release_freed_memory


def shard_models(
    module: Any, trained: Sequence[nn.Module], frozen: Sequence[nn.Module] = ()
) -> None:
    """Shard models that were just built, if ranks share them; `configure_model` calls it.

    Args:
        module: the LightningModule; its `compute_dtype` becomes the strategy's where it has none.
        trained: roots that hold trained parameters.
        frozen: roots without.
    """
    release_freed_memory()  # what loading left
    if module.device_mesh is None:
        return
    place = module.trainer.strategy
    module.compute_dtype = module.compute_dtype or place.compute_dtype
    for model in (*trained, *frozen):
        shard(model, place, frozen=model in frozen, compute_dtype=module.compute_dtype)


def move_models(module: Any, models: Sequence[nn.Module]) -> None:
    """Move models to the device where no strategy has placed them; `on_fit_start` calls it."""
    if module.device_mesh is None:
        for model in models:
            model.to(module.device)
