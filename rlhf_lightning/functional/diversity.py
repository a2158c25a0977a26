"""Metrics of the diversity of responses."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence


def distinct_n(sequences: Iterable[Sequence[Hashable]], *, n: int) -> float:
    """Return the fraction of n-grams, pooled over all sequences, that are different.

    `unique n-grams / n-grams`. Pooling is what shows a collapse: a policy that gives every prompt
    the same varied response keeps a per-response mean of 1. The value falls with the number of
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
    seen: set[tuple[Hashable, ...]] = set()
    total = 0
    for sequence in sequences:
        grams = _ngrams(sequence, n)
        seen.update(grams)
        total += len(grams)
    return len(seen) / total if total else 0.0


def unique_fraction(answers: Sequence[Hashable]) -> float:
    """Return the fraction of responses that differ from all before them; 0 for none."""
    return len(set(answers)) / len(answers) if answers else 0.0


def most_common_fraction(answers: Sequence[Hashable]) -> float:
    """Return the share of the most frequent response, 1 / n if all differ; 0 for none."""
    return max(Counter(answers).values()) / len(answers) if answers else 0.0


def repeated_ngram_fraction(sequences: Iterable[Sequence[Hashable]], *, n: int) -> float:
    """Return the mean over sequences of the fraction of n-grams that the sequence had before.

    This is repetition inside a response ("and and and"), which `distinct_n` over all responses
    mixes with responses that are alike.

    Args:
        sequences: one sequence of tokens a response; those shorter than n are left out.
        n: length of the n-grams, at least 1.

    Returns:
        0 to 1; 0 if no sequence has n tokens.

    Raises:
        ValueError: if `n` is below 1.

    Source: Welleck et al. 2020 (seq-rep-n).
    """
    fractions = [1 - len(set(grams)) / len(grams) for s in sequences if (grams := _ngrams(s, n))]
    return sum(fractions) / len(fractions) if fractions else 0.0


def novel_ngram_shares(sequences: Sequence[Sequence[Hashable]], *, n: int) -> list[float]:
    """Return, for each sequence, the share of its different n-grams that no other sequence has.

    1 where nothing is shared, 0 where everything is, and 0 for a sequence shorter than n. What a
    sequence repeats inside itself counts once, so that repetition is not novel.

    Args:
        sequences: one sequence of tokens a response.
        n: length of the n-grams, at least 1.

    Raises:
        ValueError: if `n` is below 1.
    """
    grams = [set(_ngrams(sequence, n)) for sequence in sequences]
    holders = Counter(gram for own in grams for gram in own)
    return [sum(holders[g] == 1 for g in own) / len(own) if own else 0.0 for own in grams]


def self_bleu(
    sequences: Sequence[Sequence[Hashable]], *, n: int, max_references: int, seed: int
) -> float:
    """Return the mean BLEU of each response against others: 1 is a policy that says one thing.

    BLEU with equal weights of 1- to n-grams, clipped counts, the brevity penalty of the closest
    reference length, and 1 added to matches and counts of orders above 1 (short responses would
    else score 0).

    Args:
        sequences: one sequence of tokens a response; empty ones are left out.
        n: longest n-gram, at least 1.
        max_references: others that a response is compared with, drawn with `seed`. The value grows
            with their number, so compare values of one number only.
        seed: seeds the choice of the other responses.

    Returns:
        0 to 1; NaN with fewer than two responses.

    Raises:
        ValueError: if `n` or `max_references` is below 1.

    Source: Zhu et al. 2018 (Texygen); Papineni et al. 2002; Lin and Och 2004 (smoothing).
    """
    if n < 1 or max_references < 1:
        raise ValueError(f"n={n} and max_references={max_references} must be at least 1")
    responses = [s for s in sequences if len(s)]
    if len(responses) < 2:
        return math.nan
    counts = [[Counter(_ngrams(s, order)) for order in range(1, n + 1)] for s in responses]
    draw = random.Random(seed)
    total = 0.0
    for index in range(len(responses)):
        others = [i for i in range(len(responses)) if i != index]
        if len(others) > max_references:
            others = draw.sample(others, max_references)
        lengths = [len(responses[i]) for i in others]
        total += _bleu(counts[index], [counts[i] for i in others], len(responses[index]), lengths)
    return total / len(responses)


def _bleu(
    own: list[Counter[tuple[Hashable, ...]]],
    others: list[list[Counter[tuple[Hashable, ...]]]],
    length: int,
    lengths: list[int],
) -> float:
    log_precision, orders = 0.0, 0
    for order, grams in enumerate(own):
        smooth = int(order > 0)
        seen = sum(
            min(count, max(other[order][gram] for other in others)) for gram, count in grams.items()
        )
        attempts = grams.total()
        if attempts == 0:
            break  # the response is shorter than this
        if seen + smooth == 0:
            return 0.0
        log_precision += math.log((seen + smooth) / (attempts + smooth))
        orders += 1
    closest = min(lengths, key=lambda other: (abs(other - length), other))
    brevity = min(0.0, 1 - closest / length)
    return math.exp(log_precision / orders + brevity)


def _ngrams(sequence: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    if n < 1:
        raise ValueError(f"n={n} must be at least 1: use 1 for words, 2 for pairs of words")
    return [tuple(sequence[i : i + n]) for i in range(len(sequence) - n + 1)]
