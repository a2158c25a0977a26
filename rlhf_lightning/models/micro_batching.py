"""The switch `model.micro_batches`: which rows share a forward, and how many tokens by default."""

from __future__ import annotations

from contextlib import AbstractContextManager

from rlhf_lightning.models.way import Way

# A micro-batch where no number of rows is given, padding included: the smallest that fills an H100
# at half a billion weights, whose host needs as long to launch it as the card to compute it.
TOKENS = 16_384
_way = Way("model.micro_batches", "buckets", "tokens")
_tokens = TOKENS


def micro_batching(way: str) -> AbstractContextManager[None]:
    """Put rows together in this way inside: see `models.forward.micro_batches`.

    Args:
        way: "buckets", "tokens", or "auto": buckets on a CPU, tokens elsewhere, and
            packed into one sequence where `models.forward.packs` and nothing compares bits.

    Raises:
        ValueError: for another one.
    """
    return _way.chosen_by(way)


def in_buckets(device_type: str) -> bool:
    """Return whether a row is always evaluated at one width there, so that it has one result."""
    return _way.name == "buckets" or (_way.name == "auto" and device_type == "cpu")


def automatic() -> bool:
    """Return whether no way was asked for."""
    return _way.name == "auto"


def token_budget() -> int:
    """Return the tokens of a micro-batch at most, padding included, where no rows are given."""
    return _tokens


def set_token_budget(tokens: int) -> None:
    """Set `token_budget()` for this process: what its memory allows is known with the models."""
    global _tokens
    _tokens = tokens
