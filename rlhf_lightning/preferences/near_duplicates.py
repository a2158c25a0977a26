"""Exact search for prompts that are nearly the same on both sides of a split.

Two texts are near duplicates if their sets of word n-grams overlap by a Jaccard index of at least
a threshold. The search reads an inverted index of each set's rarest n-grams, which must share one
if the index reaches the threshold: nothing is missed, and few pairs are compared.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

_WORD = re.compile(r"\w+|[^\w\s]")

Gram = tuple[str, ...]


class NearDuplicate(NamedTuple):
    """A training text and the held-out text it is nearest to.

    Args:
        train: index of the one.
        held_out: index of the other.
        similarity: Jaccard index of their n-grams, 1 where they differ in case and space at most.
    """

    train: int
    held_out: int
    similarity: float


def word_grams(text: str, n: int) -> frozenset[Gram]:
    """Return the n-grams of words and punctuation, lower case; of a short text all of it as one."""
    words = _WORD.findall(text.lower())
    if len(words) < n:
        return frozenset([tuple(words)])
    return frozenset(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def jaccard(first: frozenset[Gram], second: frozenset[Gram]) -> float:
    """Return the size of the intersection in units of that of the union."""
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)


def near_duplicates(
    train: Sequence[str], held_out: Sequence[str], *, threshold: float = 0.7, n: int = 3
) -> list[NearDuplicate]:
    """Return every training text that is a near duplicate of a held-out one, with the nearest.

    Args:
        train: training texts.
        held_out: held-out texts.
        threshold: smallest Jaccard index of a near duplicate.
        n: words in an n-gram.

    Raises:
        ValueError: if `threshold` is not above 0 and at most 1, or `n` below 1.

    Source: the prefix filter of Chaudhuri et al. 2006 and Bayardo et al. 2007, "Scaling up all
    pairs similarity search".
    """
    if not 0 < threshold <= 1 or n < 1:
        raise ValueError(f"threshold={threshold}, n={n}: use a threshold in (0, 1] and n >= 1")
    train_sets = [word_grams(text, n) for text in train]
    held_out_sets = [word_grams(text, n) for text in held_out]
    frequency = Counter(gram for grams in (*train_sets, *held_out_sets) for gram in grams)
    index: dict[Gram, list[int]] = defaultdict(list)
    for number, grams in enumerate(held_out_sets):
        for gram in _rarest(grams, threshold, frequency):
            index[gram].append(number)
    found = []
    for number, grams in enumerate(train_sets):
        near = {m for gram in _rarest(grams, threshold, frequency) for m in index.get(gram, ())}
        scored = [(jaccard(grams, held_out_sets[m]), -m) for m in near]
        best, place = max(scored, default=(0.0, 0))
        if best >= threshold:
            found.append(NearDuplicate(number, -place, best))
    return found


def _rarest(grams: frozenset[Gram], threshold: float, frequency: Counter[Gram]) -> list[Gram]:
    """Return so many of the rarest n-grams that a near duplicate must share one of them."""
    # A near duplicate shares at least threshold * size; the slack is for rounding.
    needed = math.ceil(threshold * len(grams) - 1e-9)
    ordered = sorted(grams, key=lambda gram: (frequency[gram], gram))
    return ordered[: len(grams) - needed + 1]
