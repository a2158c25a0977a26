"""Check of a batch size against the number of rows."""

from __future__ import annotations


class BatchSizeError(ValueError):
    """A batch has more rows than the data, so that some rows would be repeated in it."""

    def __init__(self, batch_size: int, num_rows: int, kind: str) -> None:
        super().__init__(
            f"batch_size={batch_size} is more than the {num_rows:,} training {kind}, so a batch "
            f"would hold some of them several times: use {batch_that_fits(num_rows)}, at most "
            f"{num_rows}, or give more records"
        )
        self.batch_size = batch_size
        self.num_rows = num_rows
        self.kind = kind


def batch_that_fits(num_rows: int, unit: int = 1) -> int | None:
    """Return the largest batch of `unit` times a power of two in the rows; None if none fits."""
    if num_rows < unit:
        return None
    size = unit
    while size * 2 <= num_rows:
        size *= 2
    return size


def check_batch_size(batch_size: int, num_rows: int, kind: str) -> None:
    """Refuse a batch that is larger than the data.

    Raises:
        BatchSizeError: with both numbers and a batch size that fits.
    """
    if batch_size > num_rows:
        raise BatchSizeError(batch_size, num_rows, kind)
