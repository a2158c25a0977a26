"""Weights in the compute dtype, rounded once for several forwards and backwards.

Under autocast every micro-batch rounds all matrices again, forward and backward. Between two steps
of the optimizer that is the same work with the same result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

# Where a weight lies in memory, and as what it is read: activation checkpointing hands every
# micro-batch a new tensor object over the same memory.
_Place = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]
# Of each weight: itself, which keeps its memory from becoming another's, its version, the result.
_Kept = dict[_Place, tuple[Tensor, int, Tensor]]
_kept: ContextVar[_Kept | None] = ContextVar("rounded_weights", default=None)


@contextmanager
def keeping_rounded_weights() -> Iterator[None]:
    """Keep what `rounded` returns until the end; half the memory of the weights it is asked for."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of `weight` in `dtype`, without a graph.

    A weight that was changed in place since is rounded again.
    """
    if weight.dtype == dtype:
        return weight.detach()
    kept = _kept.get()
    if kept is None:
        return weight.detach().to(dtype)
    memory = weight.untyped_storage()._cdata
    place = (memory, int(weight.storage_offset()), weight.shape, weight.stride(), dtype)
    known = kept.get(place)
    if known is None or known[1] != weight._version:
        rounding = weight.detach().to(dtype)
        known = kept[place] = (weight.detach(), weight._version, rounding)
    return known[2]
