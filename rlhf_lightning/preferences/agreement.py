"""Votes: agreement of annotators, and the preferences that follow.

Legend: I items (pairs), K categories.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlhf_lightning.functional.statistics import wilson_interval
from rlhf_lightning.preferences.records import SIDES, Label, Pair, completion_of, variables_of

THREE = ("first", "second", "tie")
CONFIDENCE = 0.95


def three(choice: str) -> str:
    """Return `both_bad` as `tie`: both say that neither response is better."""
    return "tie" if choice == "both_bad" else choice


def vote_counts(labels: Iterable[Label]) -> NDArray[np.int64]:
    """Return `[I, 3]`: of each pair, in their order, the votes for each of `THREE`.

    A skip is no vote, `both_bad` is a tie, and of two by one annotator on one pair the last counts.
    """
    votes = (_count(own) for own in by_pair(labels).values())
    rows = [[found[choice] for choice in THREE] for found in votes]
    return np.array(rows, dtype=np.int64).reshape(-1, len(THREE))


def raw_agreement(counts: NDArray[np.int64]) -> float:
    """Return the mean over items of the share of pairs of votes that agree.

    `P_i = sum_k n_ik (n_ik - 1) / (n_i (n_i - 1))` over items with at least two votes; NaN if there
    is none.

    Args:
        counts: `[I, K]` votes by item and category.
    """
    counts = counts[counts.sum(1) >= 2].astype(np.float64)
    totals = counts.sum(1)
    agreeing = (counts * (counts - 1)).sum(1) / (totals * (totals - 1))
    return float(agreeing.mean()) if len(counts) else math.nan


def fleiss_kappa(counts: NDArray[np.int64]) -> float:
    """Return `(P - P_e) / (1 - P_e)`, agreement beyond what chance would give.

    `P` is the raw agreement and `P_e = sum_k p_k^2` with `p_k` the share of all votes that went to
    k. With equally many votes an item it is Fleiss' kappa; with others, items with one vote are
    left out and each other item weighs the same. NaN where one category has every vote.

    Args:
        counts: `[I, K]` votes by item and category.

    Source: Fleiss 1971, "Measuring nominal scale agreement among many raters", equations 3 to 7.
    """
    counts = counts[counts.sum(1) >= 2]
    if not len(counts):
        return math.nan
    shares = counts.sum(0) / counts.sum()
    return _beyond_chance(raw_agreement(counts), float((shares**2).sum()))


def cohen_kappa(first: Sequence[int], second: Sequence[int]) -> float:
    """Return the agreement of two raters beyond chance; NaN where chance explains all of it.

    Args:
        first: categories that one rater gave.
        second: those that the other gave to the same items.

    Source: Cohen 1960, "A coefficient of agreement for nominal scales".
    """
    a, b = np.asarray(first), np.asarray(second)
    categories = np.union1d(a, b)
    by_chance = float(sum((a == k).mean() * (b == k).mean() for k in categories))
    return _beyond_chance(float((a == b).mean()), by_chance)


def _beyond_chance(agreed: float, by_chance: float) -> float:
    return math.nan if math.isclose(by_chance, 1.0) else (agreed - by_chance) / (1.0 - by_chance)


@dataclass(frozen=True)
class Share:
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

    @classmethod
    def among(cls, hits: Iterable[bool | None]) -> Share:
        """Return the share of those that are true."""
        found = list(hits)
        return cls.of(sum(map(bool, found)), len(found))


def position_bias(labels: Iterable[Label]) -> Share:
    """Return how often the response that was shown first won, among labels that took a side.

    0.5 is no bias, provided that the order was drawn at random.
    """
    return Share.among(label.choice == label.order for label in labels if label.choice in SIDES)


def agreement_with(labels: Iterable[Label | Verdict], reference: Mapping[str, str]) -> Share:
    """Return how often they agree with `reference` {pair id: choice}, where both took a side."""
    both = [(one.choice, reference.get(one.pair_id)) for one in labels]
    return Share.among(own == known for own, known in both if own in SIDES and known in SIDES)


def majority(labels: Iterable[Label]) -> str | None:
    """Return what most of a pair's labels say, None where there is none or two share the lead."""
    votes = _count(labels)
    top = [choice for choice, n in votes.items() if n == max(votes.values())]
    return top[0] if len(top) == 1 else None


NO_VOTE = "no vote"
NO_MAJORITY = "no majority among the votes"
TIE = "tie: neither response is better"


@dataclass(frozen=True)
class Verdict:
    """The preference that follows from the labels of one pair.

    Args:
        pair: pair that the labels are about.
        choice: the better response; None if the pair is no preference.
        margin: certainty, 0 to 1.
        votes: all votes by choice; `both_bad` counts as `tie`.
        by_people: whether people's votes decided.
        left_out: reason why there is no choice, else None.
    """

    pair: Pair
    choice: Literal["first", "second"] | None
    margin: float
    votes: Mapping[str, int]
    by_people: bool
    left_out: str | None = None

    @property
    def pair_id(self) -> str:
        """Id of the pair."""
        return self.pair.pair_id


def by_pair(labels: Iterable[Label]) -> dict[str, list[Label]]:
    """Return the labels by pair, without those that skip; of two by one annotator the last."""
    kept: dict[str, dict[str, Label]] = defaultdict(dict)
    for label in labels:
        if label.choice != "skip":
            kept[label.pair_id][label.annotator] = label
    return {pair_id: list(found.values()) for pair_id, found in kept.items()}


def aggregate(
    pairs: Sequence[Pair], labels: Iterable[Label], *, people: Collection[str]
) -> list[Verdict]:
    """Return one verdict per pair, in their order.

    It is the majority of the people asked; where none was, that of all annotators. The margin is
    the votes for minus those against, of all annotators, in units of all votes, at least 0.

    Args:
        pairs: pairs that get a verdict.
        labels: labels of any pairs and annotators.
        people: names of the annotators who are people.
    """
    wanted = {pair.pair_id for pair in pairs}
    found = by_pair(label for label in labels if label.pair_id in wanted)
    verdicts = []
    for pair in pairs:
        own = found.get(pair.pair_id, [])
        votes, theirs = _count(own), [label for label in own if label.annotator in people]
        top: Any = majority(theirs or own)
        why = {None: NO_MAJORITY, "tie": TIE}.get(top) if own else NO_VOTE
        choice = None if why else top
        against = votes[SIDES[choice == "first"]]
        margin = max(votes[choice] - against, 0) / votes.total() if choice else 0.0
        verdicts.append(Verdict(pair, choice, margin, votes, bool(theirs), why))
    return verdicts


def preference_row(verdict: Verdict, *, margin_scale: float = 1.0) -> dict[str, Any]:
    """Return a verdict as a record in TRL's preference format, with its origin.

    Args:
        verdict: a verdict with a choice.
        margin_scale: margin of a pair on which all agree, in units of the reward.

    Raises:
        ValueError: if the pair is no preference.
    """
    pair, choice = verdict.pair, verdict.choice
    if choice is None:
        raise ValueError(f"pair {pair.pair_id} is no preference: {verdict.left_out}")
    answers, sources = (pair.first, pair.second), (pair.first_source, pair.second_source)
    if choice == "second":
        answers, sources = answers[::-1], sources[::-1]
    return {
        "prompt": pair.prompt if isinstance(pair.prompt, str) else list(pair.prompt),
        "chosen": completion_of(pair.prompt, answers[0]),
        "rejected": completion_of(pair.prompt, answers[1]),
        **variables_of(pair),
        "domain": pair.domain,
        "margin": round(verdict.margin * margin_scale, 6),
        "pair_id": pair.pair_id,
        "votes": dict(verdict.votes),
        "labelled_by": "people" if verdict.by_people else "automatic",
        "chosen_source": sources[0],
        "rejected_source": sources[1],
    }


def left_out(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Return how many pairs are no preference, by reason."""
    return dict(Counter(v.left_out for v in verdicts if v.left_out is not None))


def _count(labels: Iterable[Label]) -> Counter[str]:
    return Counter(three(x.choice) for x in labels)
