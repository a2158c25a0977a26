"""Rows of ragged lengths for the SFT and reward steps, the same on every side."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from benchmarks.shapes import spread, token_rows


@dataclass(frozen=True)
class Ragged:
    """The rows of one optimizer step.

    Args:
        rows: rows (SFT) or pairs (reward) of a step.
        shortest, longest: tokens; the lengths between are spread evenly.
        micro_batch_size: rows or pairs in one forward and backward.
    """

    rows: int = 32
    shortest: int = 16
    longest: int = 256
    micro_batch_size: int = 8

    def as_dict(self) -> dict[str, int]:
        """Return the fields, for JSON."""
        return asdict(self)


RAGGED = {
    ("cpu", "sft"): Ragged(),
    ("cpu", "reward"): Ragged(rows=16, micro_batch_size=4),
    ("cuda", "sft"): Ragged(rows=64, longest=1024),
    ("cuda", "reward"): Ragged(rows=32, longest=1024, micro_batch_size=4),
    ("quick", "sft"): Ragged(rows=8, shortest=4, longest=16, micro_batch_size=4),
    ("quick", "reward"): Ragged(rows=8, shortest=4, longest=16, micro_batch_size=4),
}


def answers(ragged: Ragged, vocabulary: int, step: int) -> list[tuple[list[int], int]]:
    """Return a step's rows, each with the number of its first tokens that are the prompt."""
    lengths = spread(ragged.shortest, ragged.longest, ragged.rows, seed=step)
    rows = token_rows(lengths, vocabulary, seed=step)
    return [(row, max(len(row) // 4, 1)) for row in rows]


def pairs(ragged: Ragged, vocabulary: int, step: int) -> list[tuple[list[int], list[int]]]:
    """Return a step's pairs; both sides have lengths of their own."""
    lengths = spread(ragged.shortest, ragged.longest, 2 * ragged.rows, seed=step)
    rows = token_rows(lengths, vocabulary, seed=step)
    return list(zip(rows[::2], rows[1::2], strict=True))
