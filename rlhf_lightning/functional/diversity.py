"""How varied a set of responses is."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence


def distinct_n(sequences: Iterable[Sequence[Hashable]], *, n: int) -> float:
    """Return the fraction of n-grams, pooled over all sequences, that are different.

    `unique n-grams / n-grams`. Pooling is what shows a collapse: a policy that gives every prompt
    the same varied answer keeps a per-response mean of 1. The value falls with the number of
    pooled tokens, so compare sets of similar size.

    Args:
        sequences: one sequence of tokens a response.
        n: length of the n-grams, at least 1.

    Returns:
        0 to 1; 0 if no sequence has n tokens.

    Raises:
        ValueError: if `n` is below 1.

    Source: Li et al. 2016, "A diversity-promoting objective function" (distinct-1, distinct-2).
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1: use 1 for words, 2 for pairs of words")
    seen: set[tuple[Hashable, ...]] = set()
    total = 0
    for sequence in sequences:
        grams = [tuple(sequence[i : i + n]) for i in range(len(sequence) - n + 1)]
        seen.update(grams)
        total += len(grams)
    return len(seen) / total if total else 0.0
