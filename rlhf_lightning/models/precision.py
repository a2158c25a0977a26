"""Frozen weights in the dtype that autocast computes in, and the autocast that they need.

Exports are rounded here, too: to the dtype of their base, with what is lost by it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_lightning.models.loading import warn_once

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# In config.json of fp32 weights that were trained from others: what those had at the root.
BASE_DTYPE = "base_dtype"
LEAST_KEPT = 0.9  # of what training changed, that rounding must keep
KEPT = "bf16_keeps"  # likewise: the part of a merged adapter that bf16 keeps, see `Rounding`


class Rounding(NamedTuple):
    """The cost of rounding weights.

    Args:
        error: norm of what was lost, over that of the weights.
        kept: the part of what training changed that is still there, along its own direction: 1
            where all of it is, 0 where the weights are back at those before, or beyond; None
            where these are not known.
    """

    error: float
    kept: float | None


def base_dtype(config: PretrainedConfig) -> torch.dtype:
    """Return the dtype that the root of a model is kept in: bf16, and fp32 for every other.

    fp16 counts as fp32: its range is too small to round trained weights to.
    """
    named = getattr(config, BASE_DTYPE, None) or config.dtype
    is_bf16 = str(named).removeprefix("torch.") == "bfloat16"
    return torch.bfloat16 if is_bf16 else torch.float32


def rounded(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights in `dtype`; those that share memory still share it."""
    made: dict[tuple[int, torch.Size], Tensor] = {}
    found = {}
    for name, value in weights.items():
        if value.is_floating_point() and value.dtype != dtype:
            place = (value.data_ptr(), value.shape)
            value = made[place] = made[place] if place in made else value.to(dtype)
        found[name] = value
    return found


@torch.no_grad()
def measure_rounding(
    weights: Mapping[str, Tensor], start: str | None, dtype: torch.dtype, *, revision: str | None
) -> Rounding:
    """Return what rounding costs, a tensor at a time.

    Args:
        weights: in fp32, by the names they have in a file.
        start: folder or hub name of the weights before training; None for random ones.
        dtype: dtype that the weights are rounded to.
        revision: branch, tag or commit of a hub name.
    """
    files = _files_of_tensors(start, revision)
    size = lost = change = kept = 0.0
    for name, value in weights.items():
        if not value.is_floating_point():
            continue
        whole = value.detach().float().cpu()
        short = whole.to(dtype).float()
        size += float(whole.square().sum(dtype=torch.float64))
        lost += float((short - whole).square().sum(dtype=torch.float64))
        if name not in files:
            continue
        with safe_open(files[name], framework="pt") as content:
            former = content.get_tensor(name).float()
        if former.shape == whole.shape:
            delta = whole - former
            change += float(delta.square().sum(dtype=torch.float64))
            kept += float(((short - former) * delta).sum(dtype=torch.float64))
    error = (lost / size) ** 0.5 if size else 0.0
    return Rounding(error, max(kept / change, 0.0) if change else None)


def _files_of_tensors(source: str | None, revision: str | None) -> dict[str, Path]:
    """Return the safetensors file of each tensor of a model that is on this machine."""
    found: dict[str, Path] = {}
    if source is None:
        return found
    folder = Path(source)
    if not folder.is_dir():
        config = try_to_load_from_cache(source, "config.json", revision=revision)
        folder = Path(config).parent if isinstance(config, str) else folder
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            found |= dict.fromkeys(content.keys(), file)
    return found


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
