"""How far labels can be trusted: people among themselves, and the others beside them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlhf_lightning.preferences.aggregate import Verdict, by_pair, side_tally
from rlhf_lightning.preferences.agreement import (
    THREE,
    Share,
    agreement_with,
    cohen_kappa,
    collect_votes,
    fleiss_kappa,
    majority,
    position_bias,
    raw_agreement,
)
from rlhf_lightning.preferences.ceiling import (
    Ceiling,
    estimate_ceiling,
    expected_correct,
    tally_votes,
)
from rlhf_lightning.preferences.dawid_skene import dawid_skene
from rlhf_lightning.preferences.records import Label, Pair

Judged = Mapping[str, str]


@dataclass(frozen=True)
class PeopleFigures:
    """What the labels of people say about people.

    Args:
        labels: of them, skips left out.
        pairs: that they looked at.
        raw_agreement: share of pairs of votes on one pair that agree, among first, second and tie.
        fleiss_kappa: the same beyond chance.
        ties: share of the labels that find neither answer better.
        position_bias: how often the answer shown first won.
        accuracy: by person, expected share of true votes by Dawid and Skene's model.
        ceiling: what their noise leaves possible; None where no pair has two votes for a side.
    """

    labels: int
    pairs: int
    raw_agreement: float
    fleiss_kappa: float
    ties: float
    position_bias: Share
    accuracy: Mapping[str, float]
    ceiling: Ceiling | None


@dataclass(frozen=True)
class AnnotatorFigures:
    """What one annotator that is no person is like.

    Args:
        name: of the annotator.
        kind: of it.
        labels: skips left out.
        skips: pairs without an opinion.
        ties: share of the labels that find neither answer better.
        agrees: with the majority of people, where both take a side.
        kappa: Cohen's, with the majority of people, ties included.
    """

    name: str
    kind: str
    labels: int
    skips: int
    ties: float
    agrees: Share
    kappa: float


def people_figures(labels: Iterable[Label], *, seed: int = 0) -> PeopleFigures | None:
    """Return what people's labels say about them, None if there is none."""
    given = [label for label in labels if label.choice != "skip"]
    if not given:
        return None
    votes = collect_votes(given)
    counts = votes.counts
    return PeopleFigures(
        labels=int(counts.sum()),
        pairs=len(votes.items),
        raw_agreement=raw_agreement(counts),
        fleiss_kappa=fleiss_kappa(counts),
        ties=float(counts[:, THREE.index("tie")].sum() / counts.sum()),
        position_bias=position_bias(given),
        accuracy=dawid_skene(votes).accuracy,
        ceiling=estimate_ceiling(side_tally(given), seed=seed),
    )


def people_majority(labels: Iterable[Label]) -> dict[str, str]:
    """Return pair id -> what most people said, without the pairs on which they are divided."""
    votes = collect_votes(labels)
    return {
        str(item): THREE[vote]
        for item, vote in zip(votes.items, majority(votes.counts).tolist(), strict=True)
        if vote >= 0
    }


def annotator_figures(labels: Sequence[Label], people: Judged) -> AnnotatorFigures:
    """Return the figures of one annotator beside the majority of people.

    Args:
        labels: of one annotator, at least one.
        people: from `people_majority`.
    """
    given = [label for label in labels if label.choice != "skip"]
    both = [
        (THREE.index(_three(label.choice)), THREE.index(people[label.pair_id]))
        for label in given
        if label.pair_id in people
    ]
    ties = sum(_three(label.choice) == "tie" for label in given)
    return AnnotatorFigures(
        name=labels[0].annotator,
        kind=labels[0].kind,
        labels=len(given),
        skips=len(labels) - len(given),
        ties=ties / len(given) if given else math.nan,
        agrees=agreement_with(given, dict(people)),
        kappa=cohen_kappa(*zip(*both, strict=True)) if both else math.nan,
    )


def all_annotators(labels: Iterable[Label], people: Collection[str]) -> list[AnnotatorFigures]:
    """Return the figures of every annotator that is not among the people."""
    found: dict[str, list[Label]] = {}
    theirs = []
    for label in labels:
        if label.annotator in people:
            theirs.append(label)
        else:
            found.setdefault(label.annotator, []).append(label)
    reference = people_majority(theirs)
    return [annotator_figures(own, reference) for own in found.values()]


def verdicts_agree(verdicts: Iterable[Verdict], people: Judged) -> Share:
    """Return how often verdicts name the side that most people are on, where both take one."""
    both = [
        v.choice == people[v.pair.pair_id]
        for v in verdicts
        if v.choice is not None and people.get(v.pair.pair_id) in ("first", "second")
    ]
    return Share.of(sum(both), len(both))


def label_ceiling(
    verdicts: Iterable[Verdict], labels: Iterable[Label], shape: float | None
) -> float:
    """Return the accuracy that the best reward model can expect on the pairs with a verdict.

    Args:
        verdicts: of the held-out pairs.
        labels: of people, on these pairs.
        shape: of the people's noise, from `estimate_ceiling`; None where it could not be estimated.
    """
    if shape is None:
        return math.nan
    found = by_pair(labels)
    kept = [found.get(v.pair.pair_id, []) for v in verdicts if v.choice is not None]
    tally = tally_votes(
        (sum(x.choice == "first" for x in own), sum(x.choice == "second" for x in own))
        for own in kept
    )
    return expected_correct(tally, shape)


def agreement_with_truth(verdicts: Iterable[Verdict], truth: Mapping[str, float]) -> Share:
    """Return how often verdicts name the better answer, where the truth is known.

    Args:
        verdicts: of any pairs.
        truth: pair id -> first minus second, in units of the gold reward; 0 counts nowhere.
    """
    both = [
        (v.choice == "first") == (truth[v.pair.pair_id] > 0)
        for v in verdicts
        if v.choice is not None and truth.get(v.pair.pair_id)
    ]
    return Share.of(sum(both), len(both))


def gold_gaps(pairs: Sequence[Pair], scores: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return pair id -> gold of the first answer minus that of the second."""
    return {p.pair_id: first - second for p, (first, second) in zip(pairs, scores, strict=True)}


def _three(choice: str) -> str:
    return "tie" if choice == "both_bad" else choice
