"""Pairs to label, and labels drawn with known noise."""

from __future__ import annotations

import numpy as np

from rlhf_lightning.preferences.records import Label, Pair

NOW = "2026-11-02T09:30:00+00:00"
# Fleiss 1971 by way of many textbooks: 14 raters, 10 subjects, 5 categories; kappa is 0.210.
TEXTBOOK = np.array(
    [
        [0, 0, 0, 0, 14],
        [0, 2, 6, 4, 2],
        [0, 0, 3, 5, 6],
        [0, 3, 9, 2, 0],
        [2, 2, 8, 1, 1],
        [7, 7, 0, 0, 0],
        [3, 2, 6, 3, 0],
        [2, 5, 3, 2, 2],
        [6, 5, 2, 1, 0],
        [0, 2, 2, 3, 7],
    ]
)


def label(pair_id: str, annotator: str, choice: str, **changes) -> Label:
    values = {"kind": "person", "order": "first", "created": NOW} | changes
    return Label(pair_id, annotator, choice, **values)


def beta_tally(shape: float, num_items: int, num_votes: int, seed: int) -> dict:
    """Votes of `num_votes` people on items whose share of agreement is drawn from Beta(a, a)."""
    rng = np.random.default_rng(seed)
    first = rng.binomial(num_votes, rng.beta(shape, shape, num_items))
    values, counts = np.unique(first, return_counts=True)
    return {(int(a), num_votes - int(a)): int(n) for a, n in zip(values, counts, strict=True)}


def make_pairs(number: int, *, domain: str = "arithmetic") -> list[Pair]:
    return [make_pair(n, domain=domain) for n in range(number)]


def make_pair(number: int, *, domain: str = "arithmetic") -> Pair:
    return Pair.make(
        f"What is {number} plus {number}?",
        f"It is {2 * number}.",
        f"I would say {2 * number + 1}.",
        domain=domain,
        first_source="sft seed=1",
        second_source="base seed=1",
    )
