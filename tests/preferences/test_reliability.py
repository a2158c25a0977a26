"""Figures of reliability by hand, and against people whose noise is known."""

from __future__ import annotations

import math
import random

import pytest

from rlhf_lightning.data.demo.annotators import SimulatedAnnotator
from rlhf_lightning.preferences.agreement import aggregate, agreement_with
from rlhf_lightning.preferences.annotators import SimulatedPerson
from rlhf_lightning.preferences.records import SIDES, Pair
from rlhf_lightning.preferences.reliability import (
    all_annotators,
    annotator_figures,
    label_ceiling,
    people_figures,
    people_majority,
)
from tests.builders.labels import label

PEOPLE = [
    label("p", "ada", "first"),
    label("p", "bob", "first"),
    label("p", "cem", "second"),
    label("q", "ada", "second"),
    label("q", "bob", "second"),
    label("q", "cem", "skip"),
    label("r", "ada", "tie"),
    label("r", "bob", "both_bad"),
    label("s", "ada", "first"),
    label("s", "bob", "second"),
]


def test_figures_of_people_by_hand() -> None:
    figures = people_figures(PEOPLE)
    assert figures is not None
    assert (figures["labels"], figures["pairs"], figures["ties"]) == (9, 4, 2 / 9)
    # Pairs of votes that agree: 1 of 3, 1 of 1, 1 of 1, 0 of 1.
    assert figures["raw_agreement"] == pytest.approx((1 / 3 + 1 + 1 + 0) / 4)
    # Votes: first 3, second 4, tie 2 of 9.
    chance = (9 + 16 + 4) / 81
    assert figures["fleiss_kappa"] == pytest.approx(
        (figures["raw_agreement"] - chance) / (1 - chance)
    )
    assert figures["ceiling"] is not None
    assert figures["ceiling"]["num_items"] == 3  # the tie has no vote for a side
    assert people_figures([label("p", "ada", "skip")]) is None


def test_an_annotator_is_held_against_the_majority() -> None:
    rule = [
        label("p", "rule", "first", kind="rule"),
        label("q", "rule", "first", kind="rule"),
        label("r", "rule", "tie", kind="rule"),
        label("s", "rule", "first", kind="rule"),
        label("t", "rule", "skip", kind="rule"),
    ]
    figures = annotator_figures(rule, people_majority(PEOPLE))
    assert (figures["name"], figures["kind"], figures["labels"], figures["skips"]) == (
        "rule",
        "rule",
        4,
        1,
    )
    assert figures["ties"] == 0.25
    assert (figures["agrees"]["value"], figures["agrees"]["num"]) == (0.5, 2)
    # On p, q, r: agree 2/3; by chance 2/3 * 1/3 + 0 * 1/3 + 1/3 * 1/3 = 1/3.
    assert figures["kappa"] == pytest.approx((2 / 3 - 1 / 3) / (2 / 3))
    found = all_annotators([*PEOPLE, *rule], {"ada", "bob", "cem"})
    assert found == [figures]
    assert math.isnan(annotator_figures(rule, {})["kappa"])


def test_the_estimated_ceiling_is_near_what_knowing_the_truth_reaches() -> None:
    rng = random.Random(1)
    gold = {f"a{i}": rng.gauss(0, 1) for i in range(4000)}
    pairs = [Pair.make(f"q{i}", f"a{2 * i}", f"a{2 * i + 1}") for i in range(2000)]

    def scores(prompts, completions, finished):
        return [gold[text] for text in completions]

    members = [
        SimulatedPerson(SimulatedAnnotator(name, noise, 0.0), scores, seed=1)
        for name, noise in (("careful", 0.3), ("usual", 0.5), ("hasty", 0.75))
    ]
    labels = [x for member in members for x in member.label(pairs)]
    verdicts = aggregate(pairs, labels, people=[m.name for m in members])
    truth = {p.pair_id: SIDES[gold[p.first] < gold[p.second]] for p in pairs}
    reached = agreement_with(verdicts, truth).value
    figures = people_figures(labels)
    assert figures is not None
    assert figures["ceiling"] is not None
    estimate = label_ceiling(verdicts, labels, figures["ceiling"]["shape"])
    assert estimate == pytest.approx(reached, abs=0.02)
    one = aggregate(pairs, members[1].label(pairs), people=["usual"])
    assert figures["ceiling"]["single"] == pytest.approx(agreement_with(one, truth).value, abs=0.03)
    assert math.isnan(label_ceiling(verdicts, labels, None))
