"""Several ranks as threads of one process, for what `distributed/collectives.py` sums over ranks.

It takes the place of `torch.distributed` inside `rlhf_lightning.distributed.collectives`, so the
code under test is the real one. Every rank must reduce equally often, or the run fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from rlhf_lightning.distributed import collectives as distributed

T = TypeVar("T")
PATIENCE_SECONDS = 30


class SimulatedRanks:
    ReduceOp = ReduceOp

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=PATIENCE_SECONDS)
        self.slots: list[Tensor | None] = [None] * size
        self.local = threading.local()
        monkeypatch.setattr(distributed, "dist", self)

    # -- what distributed.py calls

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return hasattr(self.local, "rank")

    def get_world_size(self) -> int:
        return self.size

    def get_rank(self) -> int:
        return int(self.local.rank)

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        stacked = torch.stack(self._exchange(tensor.clone()))
        tensor.copy_(stacked.sum(0) if op == ReduceOp.SUM else stacked.amax(0))

    def all_gather_object(self, values: list[Any], mine: Any) -> None:
        values[:] = self._exchange(mine)

    def _exchange(self, mine: Tensor | None) -> list[Any]:
        self.slots[self.get_rank()] = mine
        self.barrier.wait()
        slots = list(self.slots)
        self.barrier.wait()
        if len({slot is None for slot in slots}) > 1:
            raise RuntimeError("one rank reduces while another is done")
        return slots

    # -- what tests call

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Return what `function(rank)` gives on each rank."""

        def one(rank: int) -> T:
            self.local.rank = rank
            try:
                result = function(rank)
                self._exchange(None)
            except BaseException:
                self.barrier.abort()
                raise
            return result

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(one, rank) for rank in range(self.size)]
        errors = [e for f in futures if (e := f.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
