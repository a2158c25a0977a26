"""A few records of a source, again and again: what a stage must be able to learn by heart."""

from __future__ import annotations

from rlhf_lightning.data.records import Record, RecordKind, Split
from rlhf_lightning.data.sources import RecordSource


class FirstRecords:
    """The first training records of a source, repeated, in both splits.

    Validation asks for the same records, so that its loss shows what was learnt by heart too.

    Args:
        source: where the records come from.
        num_records: how many of them.
        num_copies: how often each occurs in training.

    Raises:
        ValueError: if a number is below 1.
    """

    def __init__(self, source: RecordSource, *, num_records: int, num_copies: int) -> None:
        for name, value in (("num_records", num_records), ("num_copies", num_copies)):
            if value < 1:
                raise ValueError(f"FirstRecords.{name}={value}, expected at least 1")
        self.source = source
        self.num_records = num_records
        self.num_copies = num_copies

    def records(self, kind: RecordKind, split: Split) -> list[Record]:
        """Return the first records, in training `num_copies` times, one pass after the other."""
        first = self.source.records(kind, "train")[: self.num_records]
        return first * self.num_copies if split == "train" else first
