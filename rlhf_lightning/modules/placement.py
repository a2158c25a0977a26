"""Placement of a module's models: sharded where ranks share them, else moved to the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from rlhf_lightning.distributed.collectives import (
    agreed_max,
    gathered,
    is_sharded,
    rank,
    shard,
)
from rlhf_lightning.distributed.read_weights import ReadWeights
from rlhf_lightning.models.building import building_for
from rlhf_lightning.models.gpu_kernels import kernels_of, use_gpu_kernels
from rlhf_lightning.models.memory import Arithmetic, free_bytes, tokens_that_fit
from rlhf_lightning.models.micro_batching import TOKENS, set_token_budget
from rlhf_lightning.models.precision import MIXED_BF16, release_freed_memory
from rlhf_lightning.rollout.generators.captured import bytes_kept
from rlhf_lightning.runs.manifest import Source


@contextmanager
def sharing_models(
    module: L.LightningModule,
    compute_dtype: torch.dtype | None = None,
    *sources: Source | None,
) -> Iterator[None]:
    """Build the models of a module in this context, as `configure_model` does.

    Where ranks share them, rank 0 alone reads weights, and a factory shards every model by
    `place_on_ranks` as soon as it is complete: no rank but the first ever holds a whole one, and
    the first holds one at a time. What fails on one rank fails on all.

    Args:
        module: module of the models.
        compute_dtype: dtype of sharded forwards; None computes in the parameters' dtype.
        sources: sources of the weights, which must not change meanwhile.
    """
    if module.device_mesh is None:
        yield
        _check(sources)
        release_freed_memory()  # what loading left
        return
    builders = _Builders(module.trainer.strategy, compute_dtype)
    try:
        with building_for(builders):
            yield
        _check(sources)
    except Exception as error:
        builders.fail(error)
        raise


def _check(sources: Sequence[Source | None]) -> None:
    for source in sources:
        if source is not None:
            source.check()


class _Builders:
    """The ranks that build models together; see `models.building.Ranks`."""

    def __init__(self, strategy: Any, compute_dtype: torch.dtype | None) -> None:
        self.strategy = strategy
        self.compute_dtype = compute_dtype
        self.reads_weights = rank() == 0
        self.apart = True  # from the other ranks, which wait where this one meets them next

    def place(self, root: nn.Module, *, frozen: bool) -> None:
        if is_sharded(root):
            return
        self._meet()
        self.apart = False
        weights = ReadWeights(root, torch.device(self.strategy.mesh_of_shards.device_type))
        shard(
            root,
            self.strategy,
            frozen=frozen,
            compute_dtype=self.compute_dtype,
            prepare=weights.give,
        )
        self.apart = True
        release_freed_memory()

    def fail(self, error: Exception) -> None:
        """Tell the other ranks, if they can wait for this one."""
        if self.apart:
            self.apart = False
            gathered(f"{type(error).__name__}: {error}")

    def _meet(self) -> None:
        for number, error in enumerate(gathered(None)):
            if error is not None:
                self.apart = False
                raise RuntimeError(f"rank {number} could not build the models: {error}")


def move_models(module: L.LightningModule, models: Sequence[nn.Module]) -> None:
    """Move models to the device where no strategy has placed them, and take its kernels.

    `on_fit_start` and `on_validation_start` call it: Lightning moves submodules alone, and the base
    of an adapter is none.
    """
    if module.device_mesh is None:
        with torch.inference_mode(False):  # of a validation: nothing could be trained on the copies
            for model in models:
                model.to(module.device)
    for model in models:
        use_gpu_kernels(model)


def set_micro_batch_tokens(module: Any) -> None:
    """Bound micro-batches without a number of rows by the free memory of the GPUs, and say so.

    `on_fit_start` calls it, when the models are placed and nothing has a gradient yet. On a CPU,
    whose micro-batches have no budget, it does nothing.

    Args:
        module: an `RLHFModule` with its models, whose Trainer has a precision.
    """
    if module.device.type != "cuda":
        return
    sharded, models = module.device_mesh is not None, module.roots
    arithmetic: Arithmetic = "mixed" if module.trainer.precision == MIXED_BF16 else "fp32"
    if sharded and module.compute_dtype == torch.bfloat16:
        arithmetic = "bf16"
    free = free_bytes(module.device) - bytes_kept(module.generator, module.device)
    fit = tokens_that_fit(models, free, arithmetic, sharded=sharded)
    tokens = -agreed_max(-fit, module.device)  # of the rank with the least
    set_token_budget(tokens)
    if module.algorithm.micro_batch_size is None:
        less = "" if tokens == TOKENS else f" ({TOKENS:,} if more than {free >> 30} GiB were free)"
        rank_zero_info(f"Micro-batches of at most {tokens:,} tokens, padding included{less}")
    rank_zero_info(f"Kernels of the update: {kernels_of(models)}")
