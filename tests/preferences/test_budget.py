"""The budget: shares, whom hard pairs go to, what stays out of training, and what it costs."""

from __future__ import annotations

import random

import pytest

from rlhf_lightning.preferences.budget import (
    BudgetHparams,
    actual_cost,
    certainty,
    choose_validation,
    planned_cost,
    route,
)
from rlhf_lightning.preferences.records import Pair
from tests.builders.labels import label

PAIRS = [Pair.make(f"prompt {i // 4}", f"a{i}", "b") for i in range(1000)]


def automatic_labels(disagree=frozenset(), *, silent=frozenset()):
    rng = random.Random(1)
    found = {}
    for i, pair in enumerate(PAIRS):
        choices = (
            ["tie", "tie"] if i in silent else ["first", "second" if i in disagree else "first"]
        )
        found[pair.pair_id] = [
            label(pair.pair_id, name, choice, kind=kind, margin=rng.random())
            for name, kind, choice in zip(
                ("rule", "judge"), ("rule", "judge"), choices, strict=True
            )
        ]
    return found


def test_shares_are_as_asked_and_no_pair_is_lost_or_in_two_places() -> None:
    hparams = BudgetHparams(automatic_share=0.65, validation_share=0.1)
    held_out = choose_validation(PAIRS, hparams)
    routing = route(PAIRS, automatic_labels(), hparams, validation=held_out)
    sizes = [len(part) for part in (routing.automatic, routing.people, routing.validation)]
    assert sizes == [650, 250, 100]
    everything = [*routing.automatic, *routing.people, *routing.validation]
    assert sorted(p.pair_id for p in everything) == sorted(p.pair_id for p in PAIRS)


def test_validation_takes_whole_prompts_and_another_seed_takes_others() -> None:
    hparams = BudgetHparams(validation_share=0.1)
    held_out = choose_validation(PAIRS, hparams)
    prompts = {p.prompt_id for p in PAIRS if p.pair_id in held_out}
    assert held_out == {p.pair_id for p in PAIRS if p.prompt_id in prompts}
    assert choose_validation(PAIRS[::-1], hparams) == held_out
    assert choose_validation(PAIRS, BudgetHparams(validation_share=0.1, seed=2)) != held_out
    # Prompts that are added move few of those that were held out.
    more = [*PAIRS, *(Pair.make(f"new {i}", "a", "b") for i in range(100))]
    assert len(choose_validation(more, hparams) & held_out) >= 0.9 * len(held_out)


def test_pairs_on_which_annotators_differ_go_to_people_and_so_do_small_margins() -> None:
    disagree = set(range(0, 1000, 10))
    labels = automatic_labels(disagree)
    routing = route(PAIRS, labels, BudgetHparams(automatic_share=0.65), validation=())
    looked_at = {p.pair_id for p in routing.people}
    assert {PAIRS[i].pair_id for i in disagree} <= looked_at
    sure = certainty(labels)
    agreeing = [p for i, p in enumerate(PAIRS) if i not in disagree]
    least_kept = min(sure[p.pair_id] for p in routing.automatic)
    assert all(sure[p.pair_id] <= least_kept for p in agreeing if p.pair_id in looked_at)


def test_a_pair_without_an_automatic_label_never_becomes_one() -> None:
    hparams = BudgetHparams(automatic_share=0.7, validation_share=0.1)
    labels = automatic_labels(silent=set(range(600)))
    routing = route(PAIRS, labels, hparams, validation=choose_validation(PAIRS, hparams))
    silent = {PAIRS[i].pair_id for i in range(600)}
    assert not silent & {p.pair_id for p in routing.automatic}
    assert len(routing.automatic) + len(routing.people) == 900


def test_certainty_by_hand() -> None:
    def judged(*labels):
        return {"p": list(labels)}

    both = [label("p", "a", "first"), label("p", "b", "first")]
    assert certainty(judged(*both)) == {"p": 1.0}
    assert certainty(judged(both[0], label("p", "b", "second"))) == {"p": 0.0}
    assert certainty(judged(both[0], label("p", "b", "tie"))) == {"p": 0.5}
    assert certainty({"p": []}) == {"p": 0.0}
    # Ranks of a's margins 1, 2, 2, 4: 1/4, 3/4, 3/4, 1.
    labels = {str(i): [label(str(i), "a", "second", margin=m)] for i, m in enumerate((1, 2, 2, 4))}
    assert certainty(labels) == {"0": 0.625, "1": 0.875, "2": 0.875, "3": 1.0}


def test_the_cost_before_and_after_by_hand() -> None:
    hparams = BudgetHparams(
        automatic_share=0.65,
        validation_share=0.1,
        validation_votes=3,
        people_votes=2,
        seconds_per_label=36.0,
        hourly_wage=20.0,
        currency="EUR",
    )
    # All: 900 pairs by 2 people, 100 by 3: 2100 labels of 36 s are 21 h.
    before = planned_cost(1000, hparams)
    assert (before.labels, before.hours, before.money) == (2100, pytest.approx(21), 420)
    assert str(before) == "2100 labels, 21.0 h, 420.00 EUR"
    measured = [label(str(i), "a", "first", seconds=18.0) for i in range(100)]
    cost = actual_cost(measured, hparams, charges=1.5)
    assert (cost.hours, cost.money, cost.measured) == (0.5, 11.5, True)
    mixed = actual_cost([*measured, label("x", "a", "first")], hparams)
    assert (mixed.hours, mixed.measured) == (pytest.approx(0.51), False)
    assert actual_cost([], hparams).money == 0
