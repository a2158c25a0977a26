"""Exports in the dtype of their base: what weights are rounded to, and what is lost by it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig

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
