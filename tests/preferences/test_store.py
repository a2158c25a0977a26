"""Pairs are shared exactly, answers mean the pair, and what was acknowledged is there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rlhf_lightning.preferences.annotation.assignment import Answer, Sharing, Task
from rlhf_lightning.preferences.annotation.database import StoreError
from rlhf_lightning.preferences.annotation.store import LabelStore, describe_store
from rlhf_lightning.preferences.records import Label
from tests.builders.labels import make_pair, make_pairs
from tests.preferences.invariants import check_store

NO_GOLD = Sharing(gold_share=0.0, lease_seconds=60.0)


class Clock:
    """Seconds since 1970 that a test moves on."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock):
    with LabelStore(tmp_path / "labels.sqlite", clock=clock) as opened:
        yield opened
    check_store(tmp_path / "labels.sqlite")


def task_of(store: LabelStore, rater: int, sharing: Sharing = NO_GOLD) -> Task:
    task = store.next_task(rater, sharing)
    assert task is not None
    return task


def answer(store: LabelStore, rater: int, what: Answer, sharing: Sharing = NO_GOLD) -> Task:
    task = task_of(store, rater, sharing)
    assert store.label(rater, task.assignment_id, what, sharing) == "kept"
    return task


def test_a_pair_gets_as_many_ratings_as_were_asked_for_and_each_from_another_person(store):
    store.add_pairs(make_pairs(5), ratings_per_pair=2)
    raters = [store.enter(name)[0] for name in ("Ann", "Bob", "Cem")]
    for _ in range(20):
        for rater in raters:
            if store.next_task(rater, NO_GOLD) is not None:
                answer(store, rater, "left")
    labels = list(store.labels())
    assert Counter(label.pair_id for label in labels) == {p.pair_id: 2 for p in make_pairs(5)}
    assert len({(label.pair_id, label.annotator) for label in labels}) == 10
    assert store.progress() == store.progress().__class__(10, 10, 0, 0)


def test_the_answer_is_about_the_pair_wherever_it_was_shown(store):
    store.add_pairs(make_pairs(40), ratings_per_pair=1)
    ann = store.enter("Ann")[0]
    shown = {}
    for number in range(40):
        task = answer(store, ann, "left" if number % 2 else "right")
        shown[task.pair.pair_id] = (task.shown_first, number % 2)
    assert {order for order, _ in shown.values()} == {"first", "second"}
    for label in store.labels():
        order, left = shown[label.pair_id]
        assert label.order == order
        assert label.choice == (order if left else {"first": "second"}.get(order, "first"))
        assert label.shown_first_won is bool(left)


def test_the_order_is_random_for_each_rater_and_the_same_when_the_page_is_loaded_again(store):
    store.add_pairs(make_pairs(80), ratings_per_pair=3)
    orders = []
    for name in ("Ann", "Bob"):
        rater = store.enter(name)[0]
        orders.append([])
        for _ in range(80):
            assert task_of(store, rater) == task_of(store, rater)
            orders[-1].append(answer(store, rater, "tie").shown_first)
    for order in orders:
        assert 24 < order.count("first") < 56
    assert orders[0] != orders[1]


def test_a_lease_keeps_a_pair_and_its_end_gives_it_to_somebody_else(store, clock):
    store.add_pairs(make_pairs(1), ratings_per_pair=1)
    ann, bob = store.enter("Ann")[0], store.enter("Bob")[0]
    held = task_of(store, ann)
    assert store.next_task(bob, NO_GOLD) is None
    clock.now += 61
    assert answer(store, bob, "left").pair == held.pair
    assert store.label(ann, held.assignment_id, "right", NO_GOLD) == "gone"
    assert [label.annotator for label in store.labels()] == ["Bob"]


def test_a_late_answer_counts_if_nobody_took_the_pair_meanwhile(store, clock):
    store.add_pairs(make_pairs(2), ratings_per_pair=1)
    ann = store.enter("Ann")[0]
    held = task_of(store, ann)
    clock.now += 3600
    assert store.label(ann, held.assignment_id, "left", NO_GOLD, seconds=40.0) == "kept"
    assert next(store.labels()).seconds == 40.0
    assert store.next_task(ann, NO_GOLD).pair == make_pair(1)


def test_who_comes_back_after_the_lease_gets_the_same_pair_first(store, clock):
    store.add_pairs(make_pairs(3), ratings_per_pair=1)
    ann = store.enter("Ann")[0]
    first = answer(store, ann, "left")
    held = task_of(store, ann)
    clock.now += 3600
    assert task_of(store, ann).pair == held.pair != first.pair


def test_an_answer_sent_twice_is_one_label_and_another_answer_is_told_apart(store):
    store.add_pairs(make_pairs(2), ratings_per_pair=1)
    ann = store.enter("Ann")[0]
    task = answer(store, ann, "left")
    assert store.label(ann, task.assignment_id, "left", NO_GOLD) == "repeated"
    for other in ("right", "both_bad", "skip"):
        assert store.label(ann, task.assignment_id, other, NO_GOLD) == "differs"
    assert [label.choice for label in store.labels()] == [task.shown_first]
    assert store.undo(ann, NO_GOLD)
    assert store.label(ann, task.assignment_id, "left", NO_GOLD) == "undone"
    assert list(store.labels()) == []


def test_nobody_answers_for_another_rater(store):
    store.add_pairs(make_pairs(1), ratings_per_pair=1)
    ann, bob = store.enter("Ann")[0], store.enter("Bob")[0]
    task = task_of(store, ann)
    assert store.label(bob, task.assignment_id, "left", NO_GOLD) == "gone"
    assert store.label(ann, 10_000, "left", NO_GOLD) == "gone"
    assert list(store.labels()) == []


def test_undo_gives_the_same_pair_in_the_same_order_back_and_then_goes_on(store):
    store.add_pairs(make_pairs(30), ratings_per_pair=1)
    ann = store.enter("Ann")[0]
    answered = [answer(store, ann, "left") for _ in range(3)]
    waiting = task_of(store, ann)
    assert store.undo(ann, NO_GOLD)
    assert store.undo(ann, NO_GOLD)
    assert len(list(store.labels())) == 1
    for before in (answered[1], answered[2]):
        task = task_of(store, ann)
        assert (task.pair, task.shown_first) == (before.pair, before.shown_first)
        assert task.assignment_id != before.assignment_id
        assert task.before.choice == before.shown_first
        assert store.label(ann, task.assignment_id, "right", NO_GOLD) == "kept"
    assert task_of(store, ann) == waiting
    last = [label for label in store.labels() if label.pair_id == answered[2].pair.pair_id]
    assert [label.shown_first_won for label in last] == [False]


def test_undo_has_nothing_to_take_back_before_the_first_label(store):
    store.add_pairs(make_pairs(1), ratings_per_pair=1)
    assert not store.undo(store.enter("Ann")[0], NO_GOLD)


def test_nobody_takes_a_pair_between_undo_and_the_new_answer(store):
    store.add_pairs(make_pairs(1), ratings_per_pair=1)
    ann, bob = store.enter("Ann")[0], store.enter("Bob")[0]
    answer(store, ann, "left")
    assert store.undo(ann, NO_GOLD)
    assert store.next_task(bob, NO_GOLD) is None
    answer(store, ann, "right")


def test_a_skipped_pair_goes_to_others_and_does_not_come_back(store):
    store.add_pairs(make_pairs(1), ratings_per_pair=1)
    ann, bob = store.enter("Ann")[0], store.enter("Bob")[0]
    skipped = answer(store, ann, "skip")
    assert store.next_task(ann, NO_GOLD) is None
    assert answer(store, bob, "left").pair == skipped.pair
    assert not store.undo(ann, NO_GOLD), "the pair is complete: another label would be too many"
    assert store.progress(ann) == store.progress().__class__(1, 1, 0, 1)


def test_a_skip_can_be_taken_back_while_the_pair_is_open(store):
    store.add_pairs(make_pairs(1), ratings_per_pair=1)
    ann = store.enter("Ann")[0]
    answer(store, ann, "skip")
    assert store.undo(ann, NO_GOLD)
    answer(store, ann, "left")
    assert store.progress(ann).labelled == 1


def test_gold_questions_are_mixed_in_at_their_share_and_asked_of_everybody(store):
    store.add_pairs(make_pairs(200, gold=40), ratings_per_pair=1)
    gold = {pair.pair_id for pair in store.pairs() if pair.gold}
    sharing = Sharing(gold_share=0.2)
    for name in ("Ann", "Bob"):
        rater = store.enter(name)[0]
        seen = [answer(store, rater, "left", sharing).pair.pair_id for _ in range(100)]
        assert len(seen) == len(set(seen))
        assert 9 <= len(gold & set(seen)) <= 33
    both = Counter(label.pair_id for label in store.labels() if label.pair_id in gold)
    assert max(both.values()) == 2
    assert store.progress().done == sum(label.pair_id not in gold for label in store.labels())


def test_a_store_of_gold_questions_alone_asks_them(store):
    store.add_pairs(make_pairs(0, gold=2), ratings_per_pair=1)
    ann = store.enter("Ann")[0]
    assert [answer(store, ann, "left").pair.gold for _ in range(2)] == ["first", "first"]
    assert store.next_task(ann, NO_GOLD) is None


def test_time_and_reason_are_kept_and_impossible_times_are_replaced(store, clock):
    store.add_pairs(make_pairs(3), ratings_per_pair=1)
    ann = store.enter("Ann")[0]
    for seconds, reason in ((2.5, "  shorter "), (900.0, ""), (float("nan"), None)):
        task = task_of(store, ann)
        clock.now += 7
        store.label(ann, task.assignment_id, "left", NO_GOLD, seconds=seconds, reason=reason)
    kept = [(label.seconds, label.reason) for label in store.labels()]
    assert kept == [(2.5, "shorter"), (7.0, None), (7.0, None)]


def test_adding_pairs_again_changes_nothing(store):
    pairs = make_pairs(3)
    assert store.add_pairs(pairs, ratings_per_pair=2) == 3
    assert store.add_pairs([*pairs, make_pair(9)], ratings_per_pair=5) == 1
    assert store.progress().wanted == 11
    assert list(store.pairs()) == [*pairs, make_pair(9)]


def test_labels_from_elsewhere_count_as_ratings_if_a_person_gave_them(store):
    pairs = make_pairs(2)
    store.add_pairs(pairs, ratings_per_pair=1)
    time = "2026-11-02T09:30:00+00:00"
    given = [
        Label(pairs[0].pair_id, "Ann", "second", "person", "first", time),
        Label(pairs[1].pair_id, "short answers", "first", "rule", "first", time, margin=0.5),
    ]
    assert store.add_labels(given) == 2
    assert store.add_labels(given) == 0
    assert list(store.labels()) == given
    bob = store.enter("Bob")[0]
    assert answer(store, bob, "left").pair == pairs[1]
    assert store.next_task(bob, NO_GOLD) is None
    with pytest.raises(StoreError, match="which the store does not have: import the pairs first"):
        store.add_labels([Label("unknown", "Ann", "tie", "person", "first", time)])


def test_one_person_is_one_rater_however_the_name_is_written(store):
    assert store.enter("Ann Lee")[1], "new"
    assert not store.enter(" ann  lee ")[1]
    assert store.enter("Ann  Lee")[0] == store.enter(" ann lee ")[0] == store.enter("Ann Lee")[0]
    assert store.enter("Ann L\u0065\u0301")[0] == store.enter("Ann L\u00e9")[0]
    assert store.enter("J\u00fcrgen")[0] == store.enter("J\u00dcRGEN")[0]
    for bad in ("", "   ", "x" * 61, "Ann\u202e", "Ann\x00"):
        with pytest.raises(StoreError, match="name"):
            store.enter(bad)[0]


def test_a_change_that_fails_changes_nothing_and_the_next_one_works(store):
    with pytest.raises(StoreError, match="could not take that"):
        store.add_pairs([make_pair(1), make_pair(2, domain="\ud800")], ratings_per_pair=1)
    assert list(store.pairs()) == []
    assert store.progress().wanted == 0
    assert store.add_pairs([make_pair(1)], ratings_per_pair=1) == 1


def test_the_status_says_how_often_a_rater_chose_what_was_shown_first(tmp_path: Path):
    with LabelStore(tmp_path / "labels.sqlite") as store:
        store.add_pairs(make_pairs(6), ratings_per_pair=1)
        ann = store.enter("Ann")[0]
        for answer in ("left", "left", "left", "right", "tie", "skip"):
            task = store.next_task(ann, Sharing())
            assert task is not None
            store.label(ann, task.assignment_id, answer, Sharing())
        assert describe_store(store).splitlines()[-1].endswith("  3 of 4")
