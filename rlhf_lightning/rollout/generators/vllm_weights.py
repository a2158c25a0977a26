"""A policy's weights, one after the other, under the names of its Hugging Face checkpoint."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rlhf_vllm_"


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight as `save_pretrained` names it, a tied output head under its own name too.

    Adapters that are switched on are merged. A sharded weight is gathered when its turn comes, on
    every rank: all of them have to go through all weights. Of models whose weights transformers
    renames or fuses as it loads them, such as mixtures of experts, a layer is gathered at a time.
    """
    shapes = {
        # Of one element each: a simulation of memory counts bytes on "meta" too.
        name: torch.empty((), dtype=parameter.dtype, device="meta").expand(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    saved = revert_weight_conversion(model, shapes)
    if all(saved.get(name) is shape for name, shape in shapes.items()):
        yield from _loaded_weights(model)
        return
    for _, weights in groupby(_loaded_weights(model), key=lambda item: _layer(item[0])):
        yield from revert_weight_conversion(model, dict(weights)).items()


def _loaded_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight under its name in `model`."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, kind = name.partition(".base_layer.")
        weight = _merged(model.get_submodule(path)) if kind == "weight" else parameter.detach()
        if ".lora_" not in name:
            gather = getattr(weight, "full_tensor", None)
            yield name.replace(".base_layer.", "."), weight if gather is None else gather()


def _merged(layer: Any) -> Tensor:
    weight: Tensor = layer.base_layer.weight.detach()
    if layer.disable_adapters:
        return weight
    merged = weight.float()
    with torch.autocast(weight.device.type, enabled=False):  # it would round the product B A
        for adapter in layer.active_adapters:
            merged = merged + layer.get_delta_weight(adapter).detach()
    return merged


@contextmanager
def weight_files(model: PreTrainedModel, dtype: torch.dtype, *, write: bool) -> Iterator[Path]:
    """Yield a folder with config.json and one safetensors file a layer; it is removed afterwards.

    It is in shared memory where that has room, so that no disk is written and what is held here at
    a time is one layer.

    Args:
        model: gives weights and config.
        dtype: dtype of the files.
        write: False goes through the weights, for the sake of ranks that write, and leaves the
            folder empty.
    """
    needed = sum(p.numel() for p in model.parameters()) * dtype.itemsize if write else 0
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 1.1 * needed
    with tempfile.TemporaryDirectory(
        prefix=f"{PREFIX}{os.getpid()}_", dir=SHARED_MEMORY if roomy else None
    ) as name:
        folder = Path(name)
        layers = groupby(named_weights(model), key=lambda item: _layer(item[0]))
        for number, (_, weights) in enumerate(layers):
            if write:
                tensors = {n: w.to("cpu", dtype, copy=True).contiguous() for n, w in weights}
                save_file(tensors, folder / f"{number:05d}.safetensors")
            else:
                for _ in weights:  # gathered, and let go
                    pass
        if write:
            config = copy.deepcopy(model.config)
            config.architectures = [type(model).__name__]
            config.save_pretrained(folder)
        yield folder


def _layer(name: str) -> str:
    """Return the part of a weight's name that its layer's weights share."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: number + 1])
