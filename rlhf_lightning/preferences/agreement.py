"""Votes: agreement of annotators, a model of raters, and the preferences that follow.

Legend: N votes, I items (pairs), A annotators, K categories. A vote is an index of a category.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlhf_lightning.functional.statistics import wilson_interval
from rlhf_lightning.preferences.records import SIDES, Label, Pair, completion_of, variables_of

THREE = ("first", "second", "tie")
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Votes:
    """Votes by annotator and item, at most one for each of them.

    Args:
        items: names of the items, such as pair ids.
        annotators: names of the annotators.
        categories: names of the possible votes.
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


def three(choice: str) -> str:
    """Return `both_bad` as `tie`: both say that neither response is better."""
    return "tie" if choice == "both_bad" else choice


def collect_votes(labels: Iterable[Label]) -> Votes:
    """Return the votes of labels; the last of two by one annotator on one pair counts.

    A skip is no vote, and `both_bad` is a tie.
    """
    given = (x for x in labels if x.choice != "skip")
    votes = ((x.pair_id, x.annotator, THREE.index(three(x.choice))) for x in given)
    return make_votes(votes, THREE)


def make_votes(votes: Iterable[tuple[Hashable, str, int]], categories: Collection[str]) -> Votes:
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


def agreement_with(labels: Iterable[Label], reference: Mapping[str, str]) -> Share:
    """Return how often labels agree with `reference` {pair id: choice}, where both took a side."""
    both = [(label.choice, reference.get(label.pair_id)) for label in labels]
    return Share.among(own == known for own, known in both if own in SIDES and known in SIDES)


def majority(labels: Iterable[Label]) -> str | None:
    """Return what most of a pair's labels say, None where there is none or two share the lead."""
    votes = _count(labels)
    top = [choice for choice, n in votes.items() if n == max(votes.values())]
    return top[0] if len(top) == 1 else None


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RaterModel:
    """A fitted model of items and annotators.

    Args:
        annotators: names of the annotators.
        posterior: `[I, K]` probability of each category being true of an item.
        confusion: `[A, K, K]` probability that an annotator says the last where the middle is true.
        prior: `[K]` share of items of which each category is true.
        log_likelihood: final log-likelihood of the votes and of the pseudo-votes.
    """

    annotators: tuple[str, ...]
    posterior: Floats
    confusion: Floats
    prior: Floats
    log_likelihood: float

    @property
    def accuracy(self) -> dict[str, float]:
        """Expected share of an annotator's votes that are true, over items as they come."""
        right = np.einsum("k,akk->a", self.prior, self.confusion)
        return {name: float(x) for name, x in zip(self.annotators, right, strict=True)}


def dawid_skene(
    votes: Votes, *, smoothing: float = 1.0, max_iterations: int = 200, tolerance: float = 1e-8
) -> RaterModel:
    """Fit one confusion matrix an annotator, and the truth of every item, by EM.

    EM starts from the shares of the votes. Given the truth of an item, annotators are taken to err
    independently. Each row of a confusion matrix gets `smoothing` pseudo-votes, shared so that a
    rater without votes is right more often than not: half of them on the truth, the rest spread
    evenly. The same number goes to the prior, spread evenly.

    Args:
        votes: votes, at least one.
        smoothing: pseudo-votes; 0 is Dawid and Skene's own estimate.
        max_iterations: limit of EM iterations, at least 1.
        tolerance: stop when the log-likelihood an item rises by less.

    Source: Dawid and Skene 1979, "Maximum likelihood estimation of observer error-rates using the
    EM algorithm".
    """
    counts = votes.counts
    item, annotator, said = votes.cells.T  # [N] each
    num_categories = counts.shape[1]
    posterior = counts / counts.sum(1, keepdims=True)
    other = 0.5 / max(num_categories - 1, 1)
    pseudo = smoothing * np.where(np.eye(num_categories, dtype=bool), 0.5, other)
    previous = -np.inf
    for _ in range(max_iterations):
        prior = _shares(posterior.sum(0) + smoothing / num_categories)
        seen = np.zeros((len(votes.annotators), num_categories, num_categories))  # said, true
        np.add.at(seen, (annotator, said), posterior[item])
        confusion = _shares(seen.transpose(0, 2, 1) + pseudo)  # [A, K, K]
        log_joint = np.tile(_log(prior), (len(votes.items), 1))  # [I, K]
        np.add.at(log_joint, item, _log(confusion)[annotator, :, said])
        top = log_joint.max(1, keepdims=True)
        evidence = top[:, 0] + np.log(np.exp(log_joint - top).sum(1))
        posterior = np.exp(log_joint - evidence[:, None])
        of_prior = smoothing / num_categories * _log(prior).sum()
        likelihood = float(evidence.sum() + (pseudo * _log(confusion)).sum() + of_prior)
        if likelihood - previous < tolerance * len(posterior):
            break
        previous = likelihood
    return RaterModel(votes.annotators, posterior, confusion, prior, likelihood)


def _shares(values: Floats) -> Floats:
    total = values.sum(-1, keepdims=True)
    # Without pseudo-votes an unused category has none: any row does, it is never read.
    return np.where(total > 0, values / np.where(total > 0, total, 1), 1 / values.shape[-1])


def _log(values: Floats) -> Floats:
    return np.log(np.maximum(values, 1e-300))


Method = Literal["people_first", "majority", "dawid_skene"]
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


def by_pair(labels: Iterable[Label]) -> dict[str, list[Label]]:
    """Return the labels by pair, without those that skip; of two by one annotator the last."""
    kept: dict[str, dict[str, Label]] = defaultdict(dict)
    for label in labels:
        if label.choice != "skip":
            kept[label.pair_id][label.annotator] = label
    return {pair_id: list(found.values()) for pair_id, found in kept.items()}


def aggregate(
    pairs: Sequence[Pair],
    labels: Iterable[Label],
    *,
    people: Collection[str],
    method: Method = "people_first",
) -> list[Verdict]:
    """Return one verdict per pair, in their order.

    * `people_first`: the majority of the people asked; where none was, that of all annotators.
      The margin is the votes for minus those against, of all annotators, in units of all votes,
      at least 0.
    * `majority`: the same, every annotator counting alike.
    * `dawid_skene`: the likelier response given every annotator's confusion matrix, which is
      estimated from the same labels; the margin is the difference of the two probabilities.

    Args:
        pairs: pairs that get a verdict.
        labels: labels of any pairs and annotators.
        people: names of the annotators who are people.
        method: rule by which votes are weighed.
    """
    wanted = {pair.pair_id for pair in pairs}
    found = by_pair(label for label in labels if label.pair_id in wanted)
    posterior: dict[Hashable, list[float]] = {}
    if method == "dawid_skene":
        table = collect_votes(label for own in found.values() for label in own)
        posterior = dict(zip(table.items, dawid_skene(table).posterior.tolist(), strict=True))
    first_asked = () if method == "majority" else people
    verdicts = []
    for pair in pairs:
        own, margin = found.get(pair.pair_id, []), 0.0
        votes, theirs = _count(own), [label for label in own if label.annotator in first_asked]
        top: Any = majority(theirs or own)
        if likely := posterior.get(pair.pair_id):
            top = THREE[likely.index(max(likely))]
        why = {None: NO_MAJORITY, "tie": TIE}.get(top) if own else NO_VOTE
        choice = None if why else top
        if choice and likely:
            margin = abs(likely[0] - likely[1])
        elif choice:
            against = votes[SIDES[choice == "first"]]
            margin = max(votes[choice] - against, 0) / votes.total()
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
    return Counter("tie" if x.choice == "both_bad" else x.choice for x in labels)
