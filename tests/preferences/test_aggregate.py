"""Aggregation by hand: whose vote decides, the margin, and what is left out and why."""

from __future__ import annotations

import json

import pytest

from rlhf_lightning.data.errors import Location
from rlhf_lightning.data.formats import RowParser
from rlhf_lightning.data.records import PreferenceRecord
from rlhf_lightning.preferences.agreement import (
    NO_MAJORITY,
    NO_VOTE,
    TIE,
    aggregate,
    left_out,
    preference_row,
)
from rlhf_lightning.preferences.records import Pair
from tests.builders.labels import label

PAIR = Pair.make("q", "good", "bad", domain="sums", first_source="sft", second_source="base")


def verdict(*choices: str, people: int = 0):
    """Aggregate one pair; the first `people` choices are those of people."""
    labels = [label(PAIR.pair_id, f"a{i}", choice) for i, choice in enumerate(choices)]
    names = [f"a{i}" for i in range(people)]
    return aggregate([PAIR], labels, people=names)[0]


@pytest.mark.parametrize(
    ("choices", "people", "choice", "margin"),
    [
        (["first", "first", "second"], 0, "first", 1 / 3),
        (["second"], 1, "second", 1.0),
        # One person against two rules: the person decides, and the margin is none.
        (["second", "first", "first"], 1, "second", 0.0),
        # One person where two rules differ.
        (["second", "first", "second"], 1, "second", 1 / 3),
        (["first", "first", "tie", "both_bad", "skip"], 0, None, 0.0),
        (["first", "first", "first", "tie", "both_bad", "skip"], 0, "first", 3 / 5),
    ],
)
def test_people_decide_where_they_were_asked(choices, people, choice, margin) -> None:
    found = verdict(*choices, people=people)
    assert found.choice == choice
    assert found.margin == pytest.approx(margin)
    assert found.by_people == bool(people)


def test_what_is_no_preference_says_why() -> None:
    found = [verdict("skip"), verdict("first", "second"), verdict("tie", "both_bad", "first")]
    assert [v.left_out for v in found] == [NO_VOTE, NO_MAJORITY, TIE]
    assert left_out([*found, found[0], verdict("first")]) == {NO_VOTE: 2, NO_MAJORITY: 1, TIE: 1}
    with pytest.raises(ValueError, match="no vote"):
        preference_row(found[0])


@pytest.mark.parametrize("prompt", ["q", ({"role": "user", "content": "q"},)])
def test_a_row_is_a_record_that_the_reward_stage_reads(prompt) -> None:
    pair = Pair.make(prompt, "good", "bad", domain="sums", first_source="sft", second_source="base")
    labels = [label(pair.pair_id, name, "second") for name in ("a", "b")]
    labels.append(label(pair.pair_id, "c", "first"))
    row = preference_row(aggregate([pair], labels, people=["a"])[0], margin_scale=3.0)
    row = json.loads(json.dumps(row))
    assert row["labelled_by"] == "people"
    assert (row["chosen_source"], row["rejected_source"]) == ("base", "sft")
    assert row["votes"] == {"second": 2, "first": 1}
    record = RowParser()(row, Location("x", 1))
    assert isinstance(record, PreferenceRecord)
    assert (record.margin, record.domain) == (1.0, "sums")
    text = record.chosen if isinstance(record.chosen, str) else record.chosen[0]["content"]
    assert text == "bad"
