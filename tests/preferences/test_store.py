"""Pairs are shared among raters, choices mean the pair, and what was confirmed is there."""

from __future__ import annotations

import multiprocessing
import sqlite3
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from rlhf_lightning.preferences.annotation.store import LabelStore, StoreError, Task
from rlhf_lightning.preferences.records import Choice, Label
from tests.builders.labels import make_pairs


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


def task_of(store: LabelStore, rater: str) -> Task:
    task = store.next_task(rater)
    assert task is not None
    return task


def answer(store: LabelStore, rater: str, choice: Choice = "first", **values) -> Task:
    task = task_of(store, rater)
    assert store.label(rater, task.pair.pair_id, choice, **values)
    return task


def test_a_pair_gets_as_many_labels_as_were_asked_for_and_each_from_another_person(store):
    store.add_pairs(make_pairs(5), labels_per_pair=2)
    for _ in range(20):
        for rater in ("Ann", "Bob", "Cem"):
            if store.next_task(rater) is not None:
                answer(store, rater)
    labels = list(store.labels())
    assert Counter(x.pair_id for x in labels) == {p.pair_id: 2 for p in make_pairs(5)}
    assert len({(x.pair_id, x.annotator) for x in labels}) == 10
    progress = store.progress("Ann")
    assert (progress.wanted, progress.done) == (10, 10)
    assert progress.own == sum(x.annotator == "Ann" for x in labels)


def test_order_of_pairs_and_of_responses_is_random_by_rater_and_the_same_on_reload(store):
    store.add_pairs(make_pairs(80), labels_per_pair=3)
    orders, names = [], []
    for rater in ("Ann", "Bob"):
        for _ in range(80):
            assert task_of(store, rater) == task_of(store, rater)
            task = answer(store, rater)
            orders.append(task.shown_first)
            names.append(task.pair.pair_id)
        assert 24 < orders[-80:].count("first") < 56
    assert orders[:80] != orders[80:]
    assert names[:80] != names[80:]
    assert sorted(names[:80]) == sorted(names[80:])
    for label, order in zip(store.labels(), orders, strict=True):
        assert (label.order, label.choice) == (order, "first")


def test_a_pair_on_a_screen_is_not_shown_to_another_for_ten_minutes(store, clock):
    store.add_pairs(make_pairs(1), labels_per_pair=2)
    held = task_of(store, "Ann")
    clock.now += 599
    assert store.next_task("Bob") is None
    clock.now += 2
    assert answer(store, "Bob").pair == held.pair
    assert task_of(store, "Ann").pair == held.pair
    answer(store, "Ann")
    assert store.next_task("Bob") is None


def test_a_label_sent_twice_is_one_label_and_the_first_stays(store):
    store.add_pairs(make_pairs(2), labels_per_pair=1)
    pair = answer(store, "Ann", "first").pair
    for choice in ("first", "second", "skip"):
        assert not store.label("Ann", pair.pair_id, choice)
    assert [x.choice for x in store.labels()] == ["first"]
    with pytest.raises(StoreError, match="import the pairs first"):
        store.label("Ann", "unknown", "first")


def test_undo_gives_the_same_pair_back_with_what_was_said_and_then_goes_on(store):
    store.add_pairs(make_pairs(30), labels_per_pair=1)
    answered = [answer(store, "Ann", "second", reason=f"{n}") for n in range(3)]
    task_of(store, "Bob")
    assert store.undo("Ann")
    assert store.undo("Ann")
    assert len(list(store.labels())) == 1
    task = answer(store, "Ann", "tie")
    assert (task.pair, task.shown_first) == (answered[1].pair, answered[1].shown_first)
    assert (task.choice, task.reason) == ("second", "1")
    assert answer(store, "Ann").pair == answered[2].pair
    assert not store.undo("Cem")


def test_a_skipped_pair_goes_to_others_and_does_not_come_back(store):
    store.add_pairs(make_pairs(1), labels_per_pair=1)
    skipped = answer(store, "Ann", "skip")
    assert store.next_task("Ann") is None
    assert store.progress().done == 0
    assert answer(store, "Bob").pair == skipped.pair
    assert store.progress().done == 1
    assert store.undo("Ann")
    assert store.progress("Ann").own == 0


def test_labels_from_elsewhere_count_if_a_person_gave_them(store):
    pairs = make_pairs(2)
    store.add_pairs(pairs, labels_per_pair=1)
    time = "2026-11-02T09:30:00+00:00"
    given = [
        Label(pairs[0].pair_id, "Ann", "second", "person", "first", time),
        Label(pairs[1].pair_id, "short answers", "first", "rule", "first", time, margin=0.5),
    ]
    assert store.add_labels(given) == 2
    assert store.add_labels(given) == 0
    assert list(store.labels()) == given
    assert list(store.labels(at_page=True)) == []
    assert not store.undo("Ann")
    assert answer(store, "Bob").pair == pairs[1]
    assert store.next_task("Bob") is None
    with pytest.raises(StoreError, match="import the pairs first"):
        store.add_labels([Label("unknown", "Ann", "tie", "person", "first", time)])


def test_one_person_is_one_rater_however_the_name_is_written(store):
    store.add_pairs(make_pairs(2), labels_per_pair=1)
    for name in ("Ann Lee", "J\u00dcRGEN"):
        answer(store, store.enter(name))
    assert store.enter(" ann  lee ") == "Ann Lee"
    assert store.enter("ju\u0308rgen") == "J\u00dcRGEN"
    for bad in ("", "   ", "x" * 61, "Ann\u202e", "Ann\x00"):
        with pytest.raises(StoreError, match="name"):
            store.enter(bad)


def test_a_file_of_something_else_is_left_alone(tmp_path: Path):
    for name, text in {"short.txt": "mine", "long.txt": "These are my notes. " * 60}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(StoreError, match=name):
            LabelStore(tmp_path / name)
        assert (tmp_path / name).read_text() == text
    db = sqlite3.connect(tmp_path / "other.sqlite")
    db.execute("CREATE TABLE mine (a)")
    db.commit()
    with pytest.raises(StoreError, match="no store of labels"):
        LabelStore(tmp_path / "other.sqlite")
    assert db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 1
    db.close()


def test_a_store_holds_its_token_for_its_owner_alone(store):
    modes = {path.name: path.stat().st_mode & 0o777 for path in store.path.parent.iterdir()}
    assert len(modes) > 1
    assert set(modes.values()) == {0o600}
    with LabelStore(store.path) as again:
        assert again.token == store.token


def rate(path: Path, name: str, told: Connection) -> None:
    """Label until there is nothing left, and tell of each label that was kept."""
    with LabelStore(path) as store:
        while (task := store.next_task(name)) is not None:
            if store.label(name, task.pair.pair_id, task.shown_first):
                told.send(task.pair.pair_id)


def start(path: Path, name: str) -> tuple[ForkProcess, Connection]:
    fork = multiprocessing.get_context("fork")
    told, tells = fork.Pipe(duplex=False)
    process = fork.Process(target=rate, args=(path, name, tells), daemon=True)
    process.start()
    tells.close()  # or its end would not be seen
    return process, told


def rest_of(told: Connection) -> list[str]:
    found = []
    with suppress(EOFError):
        while True:
            found.append(told.recv())
    return found


def test_processes_that_label_at_once_never_exceed_the_labels_and_lose_nothing(tmp_path: Path):
    path = tmp_path / "labels.sqlite"
    with LabelStore(path) as store:
        store.add_pairs(make_pairs(60), labels_per_pair=2)
    raters = [start(path, f"rater {n}") for n in range(3)]
    told = [rest_of(connection) for _, connection in raters]
    for process, _ in raters:
        process.join(30)
        assert process.exitcode == 0
    with LabelStore(path) as store:
        labels = list(store.labels())
    assert {(x.annotator, x.pair_id) for x in labels} == {
        (f"rater {n}", pair) for n, pairs in enumerate(told) for pair in pairs
    }
    assert max(Counter(x.pair_id for x in labels).values()) == 2
