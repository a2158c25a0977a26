"""Who looks at what: panels of simulated people, and real ones through the store of the page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rlhf_lightning.preferences.annotation.store import LabelStore
from rlhf_lightning.preferences.annotators import (
    STORE,
    LengthRule,
    PageAnnotators,
    Panel,
    PeopleNeededError,
    RuleAnnotator,
)
from rlhf_lightning.preferences.records import Choice, Journal, Label, Pair
from tests.builders.labels import NOW

PAIRS = [Pair.make(f"q{i}", "one", "one two three") for i in range(300)]


def panel(*names: str, seed: int = 1) -> Panel:
    return Panel([RuleAnnotator([LengthRule(3)], name=name) for name in names], seed=seed)


def test_every_pair_gets_as_many_different_people_as_asked(tmp_path: Path) -> None:
    asked = [(pair, 2 if i < 60 else 1) for i, pair in enumerate(PAIRS)]
    journal = Journal(tmp_path / "labels.jsonl", Label)
    labels = panel("a", "b", "c").labels(asked, tmp_path, journal)
    per_pair = Counter(x.pair_id for x in labels)
    assert [per_pair[pair.pair_id] for pair, _ in asked] == [count for _, count in asked]
    assert len({(x.pair_id, x.annotator) for x in labels}) == len(labels) == 360
    assert all(95 < count < 145 for count in Counter(x.annotator for x in labels).values())
    assert sorted(journal.read(), key=str) == sorted(labels, key=str)
    # Who looks at a pair does not depend on what else is asked.
    few = panel("a", "b", "c").labels(asked[:7], tmp_path, Journal(tmp_path / "few.jsonl", Label))
    names = {pair.pair_id for pair in PAIRS[:7]}
    told, again = ([(x.pair_id, x.annotator) for x in found] for found in (labels, few))
    assert again == [each for each in told if each[0] in names]


def test_people_at_the_page_are_waited_for_and_then_heard(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "labels.jsonl", Label)
    asked = [(PAIRS[0], 2), (PAIRS[1], 1)]
    with pytest.raises(PeopleNeededError, match=r"3 of 3 labels.*store=.*resume=auto"):
        PageAnnotators().labels(asked, tmp_path, journal)
    given = [
        Label(PAIRS[0].pair_id, "ada", "first", "person", "first", NOW, seconds=4.0),
        Label(PAIRS[0].pair_id, "bob", "second", "person", "second", NOW, seconds=5.0),
        Label(PAIRS[1].pair_id, "ada", "tie", "person", "first", NOW, seconds=6.0),
    ]
    with LabelStore(tmp_path / STORE) as store:
        assert store.add_labels(given[:2]) == 2
    with pytest.raises(PeopleNeededError, match="1 of 3 labels"):
        PageAnnotators().labels(asked, tmp_path, journal)
    assert journal.read() == []
    with LabelStore(tmp_path / STORE) as store:
        store.add_labels(given[2:])
    found = PageAnnotators().labels(asked, tmp_path, journal)
    assert sorted((x.pair_id, x.annotator, x.choice) for x in found) == sorted(
        (x.pair_id, x.annotator, x.choice) for x in given
    )
    assert len(journal.read()) == 3
    PageAnnotators().labels(asked, tmp_path, journal)
    assert len(journal.read()) == 3


def test_a_skip_is_no_label_of_people(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "labels.jsonl", Label)
    asked = [(PAIRS[0], 2), (PAIRS[1], 1)]
    with pytest.raises(PeopleNeededError):
        PageAnnotators().labels(asked, tmp_path, journal)

    def give(pair: Pair, name: str, choice: Choice) -> None:
        with LabelStore(tmp_path / STORE) as store:
            store.add_labels([Label(pair.pair_id, name, choice, "person", "first", NOW)])

    for name in ("ada", "bob", "cy"):
        give(PAIRS[0], name, "skip")
        give(PAIRS[1], name, "skip")
    with pytest.raises(PeopleNeededError, match="3 of 3 labels"):
        PageAnnotators().labels(asked, tmp_path, journal)
    for name in ("dan", "eve"):
        give(PAIRS[0], name, "first")
        give(PAIRS[1], name, "second")
    assert len(PageAnnotators().labels(asked, tmp_path, journal)) == 10
