"""Rows as the lines of a file that is not there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_lightning.data.errors import Location
from rlhf_lightning.data.files import LocatedRow
from rlhf_lightning.data.records import Split
from rlhf_lightning.data.sources.base import RowSource


@dataclass(eq=False, repr=False)
class LocatedRows(RowSource):
    """Records of rows, each of which is a line of `set.jsonl`."""

    rows: Sequence[Any]

    @property
    def label(self) -> str:
        return "set.jsonl"

    def _rows(self, split: Split) -> Iterable[LocatedRow] | None:
        located = ((Location(self.label, i), row) for i, row in enumerate(self.rows, start=1))
        return located if split == "train" else None


def source_of(*rows: Any, **options: Any) -> LocatedRows:
    """Return the source of rows that are all for training."""
    return LocatedRows(rows, validation_fraction=0.0, **options)
