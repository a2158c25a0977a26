"""A policy's weights, one after the other, under the names of its Hugging Face checkpoint."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from peft.utils.integrations import dequantize_module_weight
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

SHARED_MEMORY = Path("/dev/shm")


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of `model`, a tied output head under its own name too.

    Adapters that are switched on are merged into what they stand on. A sharded weight is gathered
    when its turn comes, on every rank: all of them have to go through all weights.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, kind = name.partition(".base_layer.")
        if kind == "weight":
            yield f"{path}.{kind}", _whole(_merged(model.get_submodule(path)))
        elif ".lora_" not in name:
            yield name.replace(".base_layer.", "."), _whole(parameter.detach())


def _whole(weight: Tensor) -> Tensor:
    gather: Callable[[], Tensor] | None = getattr(weight, "full_tensor", None)
    return weight if gather is None else gather()


def _merged(layer: Any) -> Tensor:
    weight: Tensor = dequantize_module_weight(layer.base_layer).detach()
    if layer.disable_adapters:
        return weight
    merged = weight.float()
    for adapter in layer.active_adapters:
        merged = merged + layer.get_delta_weight(adapter).detach()
    return merged


@contextmanager
def weight_files(model: PreTrainedModel, dtype: torch.dtype, *, write: bool) -> Iterator[Path]:
    """Yield a folder with config.json and one safetensors file a layer; it is gone afterwards.

    It is in shared memory where that has room, so that no disk is written and what is held here at
    a time is one layer.

    Args:
        model: gives weights and config.
        dtype: of the files.
        write: False goes through the weights, for the sake of ranks that write, and leaves the
            folder empty.
    """
    needed = sum(p.numel() for p in model.parameters()) * dtype.itemsize if write else 0
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 1.1 * needed
    with tempfile.TemporaryDirectory(
        prefix="rlhf_vllm_", dir=SHARED_MEMORY if roomy else None
    ) as name:
        folder = Path(name)
        layers = groupby(named_weights(model), key=lambda item: _layer(item[0]))
        for number, (_, weights) in enumerate(layers):
            if write:
                tensors = {n: w.to("cpu", dtype, copy=True).contiguous() for n, w in weights}
                save_file(tensors, folder / f"{number:05d}.safetensors")
            else:
                list(weights)
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
