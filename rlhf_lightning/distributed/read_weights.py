"""Weights that rank 0 alone has read, given to the other ranks a part of the model at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhf_lightning.distributed.collectives import gathered, rank

Place = tuple[dict[str, Any], str]  # where a module keeps a tensor


class ReadWeights:
    """The parameters and buffers of a model, of which the other ranks have shapes alone.

    Rank 0 says what there is: which tensors, which of them are one (tied), shapes and dtypes.

    Args:
        model: alike on all ranks, but on the meta device where no weights were read.
        device: where the model is about to be placed.

    Raises:
        RuntimeError: on the rank whose model has other tensors than that of rank 0.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        places = dict(tensors_of(model))
        lacks = any(store[key].is_meta for store, key in places.values())
        told = gathered((lacks, _described(places) if rank() == 0 else None))
        self.needed = any(lacks for lacks, _ in told)
        self.described: dict[str, Any] = told[0][1] or {}
        self.given: set[str] = set()
        for name in sorted(places.keys() ^ self.described.keys()):
            differs = f"rank {rank()} builds {type(model).__name__} otherwise than rank 0: {name}"
            raise RuntimeError(f"{differs}: start all ranks with the same files and versions")
        self.names: dict[int, dict[str, str]] = {id(store): {} for store, _ in places.values()}
        for name, (store, key) in places.items():
            self.names[id(store)][key] = name

    def give(self, part: nn.Module) -> None:
        """Put rank 0's numbers of what `part` holds, and is not sharded yet, on every rank.

        Raises:
            ValueError: if a tensor is tied to one of a part that has been given before.
        """
        if not self.needed:
            return
        before = {self.described[name][0] for name in self.given}
        made: dict[int, Tensor] = {}
        for store, key in [place for _, place in tensors_of(part)]:
            name = self.names[id(store)][key]
            if name in self.given:  # a buffer of a unit inside
                continue
            number, shape, dtype = self.described[name]
            if number in before:
                raise ValueError(f"{name} is tied to a tensor of another unit of FSDP2")
            if number not in made:
                made[number] = self._of_rank_0(store[key], shape, dtype)
            store[key] = made[number]
            self.given.add(name)

    def _of_rank_0(self, own: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if rank() == 0:
            whole = own.detach().to(self.device).contiguous()
        else:
            whole = torch.empty(shape, dtype=dtype, device=self.device)
        dist.broadcast(whole, 0)
        return nn.Parameter(whole, own.requires_grad) if isinstance(own, nn.Parameter) else whole


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Place]]:
    """Yield name and place of every tensor that is not sharded; tied ones once a name.

    A module may keep one as a plain attribute, which neither `parameters()` nor `buffers()` know.
    """
    for path, module in model.named_modules():
        for store in (module._parameters, module._buffers, vars(module)):
            for key, value in store.items():
                if isinstance(value, Tensor) and not isinstance(value, DTensor):
                    yield f"{path}.{key}", (store, key)


def _described(places: dict[str, Place]) -> dict[str, tuple[int, torch.Size, torch.dtype]]:
    """Return number, shape and dtype of each tensor by name; tied ones have one number."""
    numbers: dict[int, int] = {}
    described = {}
    for name, (store, key) in places.items():
        tensor = store[key]
        number = numbers.setdefault(id(tensor), len(numbers))
        described[name] = (number, tensor.shape, tensor.dtype)
    return described
