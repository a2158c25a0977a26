"""Ranks that do not exist, for what only counts memory and messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@contextmanager
def fake_ranks(count: int, *, rank: int) -> Iterator[None]:
    """Be `rank` of `count` inside; what the others send has no numbers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def own_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor that may be sharded."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
