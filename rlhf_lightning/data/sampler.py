"""Batch samplers: the rows of a batch are a pure function of the seed and the batch's number.

The data is one endless stream: pass after pass, each a permutation of all rows drawn from
(seed, pass). A stage reads the first `num_iterations * batch_size` positions of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch.utils.data import Sampler

NUM_BATCHES_SORTED_TOGETHER = 16
RowT = TypeVar("RowT")


@dataclass(eq=False, repr=False)
class StreamBatchSampler(Sampler[list[Any]]):
    """Yields this rank's rows of batch `consumed`, `consumed + 1`, ... `num_iterations - 1`.

    Without `lengths` batch i is stream positions `[i * batch_size, (i + 1) * batch_size)`: every
    row comes once a pass, and a batch may straddle two passes.

    With `lengths` rows of like length are put together. A pass owns the batches whose first
    position lies in it, so its last batch is filled up from the start of the next pass, which then
    continues behind it: every row still comes once a pass, none is dropped or repeated. Inside a
    pass the (permuted) batches are taken 16 at a time, their rows sorted by length and cut again,
    and the order of all batches of the pass is shuffled.

    With `groups` the rows of a group follow each other in a pass, in a new random order each pass,
    and so do the groups.

    Args:
        num_rows: rows of the data.
        batch_size: rows of a global batch.
        num_iterations: batches of the whole stage; `len` is this number, also after a resume.
        seed: seeds the permutations.
        lengths: tokens of each row, to group by; None for no grouping.
        groups: group of each row; not with `lengths`.
        rank: takes the contiguous share `rank` of each global batch.
        world_size: number of shares; must divide `batch_size`.
        with_row_ids: yield (row, row id) pairs, where the row id is the position in the stream,
            `iteration * batch_size + position in the global batch`.
        num_spare_batches: following batches whose share of this rank is yielded too, behind that
            of the batch; the stream does not move on for them.
        whole_spares: yield these batches whole, to every rank.

    Attributes:
        consumed: batches that are trained on already; iteration starts behind them.

    Raises:
        ValueError: if `world_size` does not divide `batch_size`.
    """

    num_rows: int
    _: KW_ONLY
    batch_size: int
    num_iterations: int
    seed: int
    lengths: Sequence[int] | None = None
    groups: Sequence[int] | None = None
    rank: int = 0
    world_size: int = 1
    with_row_ids: bool = False
    num_spare_batches: int = 0
    whole_spares: bool = False

    def __post_init__(self) -> None:
        """Check the numbers; nothing is drawn yet."""
        if self.batch_size % self.world_size:
            share = self.batch_size // self.world_size
            fix = f"use {max(share, 1) * self.world_size} or {(share + 1) * self.world_size}"
            found = f"batch_size={self.batch_size} must be divisible by the {self.world_size} ranks"
            raise ValueError(f"{found}: {fix}")
        self.consumed = 0
        # A pass and the next one are read by turns.
        self._permuted = lru_cache(2)(self._permutation)
        self._by_length = lru_cache(2)(self._grouped)

    def __len__(self) -> int:
        """Return the batches of the whole stage."""
        return self.num_iterations

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield this rank's share of every batch that is still to be trained on."""
        for iteration in range(self.consumed, self.num_iterations):
            rows = self._share(iteration)
            for number in range(iteration + 1, iteration + 1 + self.num_spare_batches):
                rows += self._share(number, whole=self.whole_spares)
            yield rows

    def _share(self, iteration: int, *, whole: bool = False) -> list[Any]:
        local = self.batch_size if whole else self.batch_size // self.world_size
        start = 0 if whole else self.rank * local
        share = self.batch(iteration)[start : start + local]
        if not self.with_row_ids:
            return share
        first = iteration * self.batch_size + start
        return [(row, first + i) for i, row in enumerate(share)]

    def batch(self, iteration: int) -> list[int]:
        """Return the rows of a global batch, by its number from 0."""
        if self.lengths is None:
            return self._positions(iteration * self.batch_size, self.batch_size)
        number = iteration * self.batch_size // self.num_rows
        return self._by_length(number)[iteration - self._first_batch(number)]

    def _positions(self, start: int, count: int) -> list[int]:
        """Return the rows at `count` positions of the stream from `start` on."""
        rows = []
        while count > 0:
            number, offset = divmod(start, self.num_rows)
            taken = self._permuted(number)[offset : offset + count]
            rows += taken
            start, count = start + len(taken), count - len(taken)
        return rows

    def _first_batch(self, number: int) -> int:
        """Return the first batch whose first position lies in pass `number` or behind."""
        return -(-number * self.num_rows // self.batch_size)

    def _grouped(self, number: int) -> list[list[int]]:
        """Return the batches of a pass, grouped by length and shuffled."""
        assert self.lengths is not None
        first, end = self._first_batch(number), self._first_batch(number + 1)
        size = self.batch_size
        rows = self._positions(first * size, (end - first) * size)
        together = NUM_BATCHES_SORTED_TOGETHER * size
        batches = []
        for start in range(0, len(rows), together):
            by_length = sorted(rows[start : start + together], key=self.lengths.__getitem__)
            batches += [by_length[i : i + size] for i in range(0, len(by_length), size)]
        generator = stream_generator(self.seed, "batch order", number)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def _permutation(self, number: int) -> list[int]:
        generator = stream_generator(self.seed, "permutation", number)
        rows: list[int] = torch.randperm(self.num_rows, generator=generator).tolist()
        if (groups := self.groups) is None:
            return rows
        names = sorted(set(groups))
        order = torch.randperm(len(names), generator=generator).tolist()
        place = dict(zip(names, order, strict=True))
        return sorted(rows, key=lambda row: place[groups[row]])


class SequentialBatchSampler(Sampler[list[int]]):
    """Yields every row once, for validation, with the same number of batches on every rank.

    Rows are dealt to the ranks evenly, because a rank that runs out of batches would leave the
    others waiting in a collective operation; batches differ by one row at most.

    Args:
        num_rows: rows of the data.
        batch_size: most rows of a rank's batch (one more where rows cannot be dealt otherwise).
        lengths: tokens of each row, to go from the shortest to the longest; None to keep the order.
        rank: number of this process.
        world_size: total number of processes.

    Raises:
        ValueError: if there are rows, but fewer than ranks.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        batch_size: int,
        lengths: Sequence[int] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Deal the rows."""
        if 0 < num_rows < world_size:
            found = f"{num_rows} validation rows cannot be dealt to {world_size} ranks"
            raise ValueError(f"{found}: hold out more")
        order = list(range(num_rows))
        if lengths is not None:
            order.sort(key=lengths.__getitem__)
        rounds = min(-(-num_rows // (batch_size * world_size)), num_rows // world_size)
        parts = rounds * world_size
        edges = [num_rows * part // parts for part in range(parts + 1)] if parts else [0]
        own = range(rank, parts, world_size)
        self.batches = [order[edges[part] : edges[part + 1]] for part in own]

    def __len__(self) -> int:
        """Return the number of this rank's batches."""
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches."""
        yield from self.batches


def stream_generator(seed: int, purpose: str, number: int) -> torch.Generator:
    """Return a generator that is a function of its arguments only."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{number}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def validation_part(rows: list[RowT], count: int | None, seed: int) -> list[RowT]:
    """Return a random part of the held-out rows in their order, the same for every caller.

    Args:
        rows: all held-out rows that are not too long.
        count: size of the part; None for all.
        seed: seeds the choice of rows.
    """
    if count is None or len(rows) <= count:
        return rows
    order = torch.randperm(len(rows), generator=stream_generator(seed, "validation rows", 0))
    return [rows[i] for i in sorted(order[:count].tolist())]
