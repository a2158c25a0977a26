"""Frozen weights in the dtype that autocast computes in, and the autocast that they need."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_lightning.models.loading import warn_once
from rlhf_lightning.models.rounding import KEPT, LEAST_KEPT


def release_freed_memory() -> None:
    """Let the C library return free pages to the system, where it can (glibc).

    It keeps what was freed for the next allocation. After weights were loaded in fp32 and rounded,
    or after the activations of an update, that is hundreds of megabytes that stand empty while the
    next phase allocates in other sizes. Elsewhere than on Linux this does nothing.
    """
    trim = _malloc_trim()
    if trim is not None:
        gc.collect(0)
        trim(0)


@cache
def _malloc_trim() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(
            ctypes.CDLL(ctypes.util.find_library("c") or "libc.so.6"), "malloc_trim", None
        )
    except OSError:  # another C library
        return None


def set_matmul_precision(level: str) -> None:
    """Set how CUDA multiplies fp32 matrices: `highest` in fp32, `high` in TF32.

    On a CPU nothing is set: `high` would let oneDNN round there too, and change bits.
    """
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision(level)


MIXED_BF16 = "bf16-mixed"
_ROUNDED = "_rounded_for_bf16_mixed"


def round_frozen_weights(model: PreTrainedModel, precision: str) -> None:
    """Hold the matrices of frozen `model` in the dtype that autocast would cast them to, in place.

    Under `bf16-mixed` autocast rounds the weights of every matrix product to bf16 in each forward.
    Rounded once, they give the same bits at half the memory and without the casts. Embeddings,
    norms and the output head, which may be tied to the embeddings, stay as they are.

    Args:
        model: whose decoder's `Linear` and `Conv1D` modules are rounded.
        precision: the Trainer's; anything but `bf16-mixed` changes nothing.
    """
    if precision != MIXED_BF16:
        return
    if (kept := getattr(model.config, KEPT, 1.0)) < LEAST_KEPT:
        warn_once(
            f"bf16-mixed keeps {100 * kept:.0f} % of what the adapter changed that is merged in "
            f"{model.name_or_path}: use trainer.precision=32-true"
        )
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            setattr(part, _ROUNDED, True)
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            for name, parameter in list(module.named_parameters(recurse=False)):
                rounded = nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=False)
                setattr(module, name, rounded)
    for parameter in model.parameters():
        if parameter.dtype != torch.bfloat16:
            # What was read from a file may be a view of it, which would hold all of it in memory.
            parameter.data = parameter.data.clone()
    release_freed_memory()


def computing(model: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
    """Return the autocast without which `model`, whose matrices are rounded, cannot compute.

    Lightning opens one around the steps of a Trainer alone. Where one is open, and for a model that
    was never rounded, nothing is changed.

    Args:
        model: a Hugging Face model.
        device: device of the computation.
    """
    if not getattr(model, _ROUNDED, False) or device.type == "meta":
        return nullcontext()
    if torch.is_autocast_enabled(device.type):
        return nullcontext()
    return in_precision(MIXED_BF16, device)


def in_precision(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a Trainer of that precision runs its steps."""
    if precision != MIXED_BF16:
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)
