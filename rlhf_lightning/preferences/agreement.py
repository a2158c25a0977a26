"""How far annotators agree: raw agreement, Fleiss' and Cohen's kappa, and position bias.

Legend: I items (pairs), A annotators, K categories. A vote is an index of a category.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_lightning.functional.statistics import wilson_interval
from rlhf_lightning.preferences.records import SIDES, Label

THREE = ("first", "second", "tie")
MISSING = -1
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Votes:
    """Who said what of which item; one vote an annotator and item at most.

    Args:
        items: names of the items, such as pair ids.
        annotators: their names.
        categories: what can be said.
        cells: `[N, 3]` int64, a row a vote: indices of item, annotator and category.
    """

    items: tuple[Hashable, ...]
    annotators: tuple[str, ...]
    categories: tuple[str, ...]
    cells: NDArray[np.int64]

    @property
    def counts(self) -> NDArray[np.int64]:
        """`[I, K]`: votes for each category."""
        counts = np.zeros((len(self.items), len(self.categories)), dtype=np.int64)
        np.add.at(counts, (self.cells[:, 0], self.cells[:, 2]), 1)
        return counts

    @property
    def table(self) -> NDArray[np.int64]:
        """`[I, A]`: index of the category, `MISSING` where there is no vote."""
        table = np.full((len(self.items), len(self.annotators)), MISSING, dtype=np.int64)
        table[self.cells[:, 0], self.cells[:, 1]] = self.cells[:, 2]
        return table


def collect_votes(labels: Iterable[Label], *, categories: Sequence[str] = THREE) -> Votes:
    """Return the votes of labels; of two by one annotator on one pair the last counts.

    Args:
        labels: of any annotators; those that skip are no votes.
        categories: what counts, others are no votes. Without `both_bad` among them it counts as
            `tie`: both say that neither answer is better.
    """
    index = {choice: k for k, choice in enumerate(categories)}
    if "tie" in index:
        index.setdefault("both_bad", index["tie"])
    votes = ((x.pair_id, x.annotator, index[x.choice]) for x in labels if x.choice in index)
    return make_votes(votes, categories)


def make_votes(votes: Iterable[tuple[Hashable, str, int]], categories: Sequence[str]) -> Votes:
    """Return the table of (item, annotator, category index); items in the order they come in."""
    items: dict[Hashable, int] = {}
    annotators: dict[str, int] = {}
    cells: dict[tuple[int, int], int] = {}
    for item, name, vote in votes:
        row = items.setdefault(item, len(items))
        cells[row, annotators.setdefault(name, len(annotators))] = vote
    array = np.array([(*place, vote) for place, vote in cells.items()], dtype=np.int64)
    return Votes(tuple(items), tuple(annotators), tuple(categories), array.reshape(-1, 3))


def raw_agreement(counts: NDArray[np.int64]) -> float:
    """Return the mean over items of the share of pairs of votes that agree.

    `P_i = sum_k n_ik (n_ik - 1) / (n_i (n_i - 1))` over items with at least two votes; NaN if there
    is none.

    Args:
        counts: `[I, K]` votes.
    """
    per_item = _agreement_of_items(counts)
    return float(per_item.mean()) if len(per_item) else math.nan


def fleiss_kappa(counts: NDArray[np.int64]) -> float:
    """Return `(P - P_e) / (1 - P_e)`, agreement beyond what chance would give.

    `P` is the raw agreement and `P_e = sum_k p_k^2` with `p_k` the share of all votes that went to
    k. With equally many votes an item it is Fleiss' kappa; with others, items with one vote are
    left out and each other item weighs the same. NaN where one category has every vote.

    Args:
        counts: `[I, K]` votes.

    Source: Fleiss 1971, "Measuring nominal scale agreement among many raters", equations 3 to 7.
    """
    counts = counts[counts.sum(1) >= 2]
    if not len(counts):
        return math.nan
    shares = counts.sum(0) / counts.sum()
    by_chance = float((shares**2).sum())
    if math.isclose(by_chance, 1.0):
        return math.nan
    return (raw_agreement(counts) - by_chance) / (1.0 - by_chance)


def cohen_kappa(first: Sequence[int], second: Sequence[int]) -> float:
    """Return the agreement of two raters beyond chance; NaN where chance explains all of it.

    Args:
        first: categories that one rater gave.
        second: those that the other gave to the same items.

    Raises:
        ValueError: if they differ in length, or are empty.

    Source: Cohen 1960, "A coefficient of agreement for nominal scales".
    """
    a, b = np.asarray(first), np.asarray(second)
    if a.shape != b.shape or not len(a):
        raise ValueError(f"{len(a)} and {len(b)} ratings: give both raters the same items")
    categories = np.union1d(a, b)
    by_chance = float(sum((a == k).mean() * (b == k).mean() for k in categories))
    if math.isclose(by_chance, 1.0):
        return math.nan
    return (float((a == b).mean()) - by_chance) / (1.0 - by_chance)


class Share(NamedTuple):
    """A share of a count, with its 95 % Wilson interval; NaN where there is nothing to count."""

    value: float
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, successes: float, n: int) -> Share:
        """Return the share of `successes` in `n`."""
        low, high = wilson_interval(successes, n, confidence=CONFIDENCE)
        return cls(successes / n if n else math.nan, low, high, n)


def position_bias(labels: Iterable[Label]) -> Share:
    """Return how often the answer that was shown first won, of the labels that took a side.

    0.5 is no bias, provided that the order was drawn at random.
    """
    won = [label.shown_first_won for label in labels if label.choice in SIDES]
    return Share.of(sum(bool(first) for first in won), len(won))


def agreement_with(labels: Iterable[Label], reference: dict[str, str]) -> Share:
    """Return how often labels agree with `reference` {pair id: choice}, where both took a side."""
    both = [
        label.choice == reference[label.pair_id]
        for label in labels
        if label.choice in SIDES and reference.get(label.pair_id) in SIDES
    ]
    return Share.of(sum(both), len(both))


def majority(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `[I]` the category with the most votes, `MISSING` where two share the lead."""
    if not counts.shape[1]:
        return np.full(len(counts), MISSING)
    top = counts.max(1, keepdims=True)
    alone = ((counts == top).sum(1) == 1) & (top[:, 0] > 0)
    return np.where(alone, counts.argmax(1), MISSING)


def _agreement_of_items(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    counts = counts[counts.sum(1) >= 2].astype(np.float64)
    totals = counts.sum(1)
    return (counts * (counts - 1)).sum(1) / (totals * (totals - 1))
