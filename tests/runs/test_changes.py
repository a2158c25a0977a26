"""In what a run differs from its experiment as it is shipped."""

from __future__ import annotations

from rlhf_lightning.runs.changes import Change, find_changes

SHIPPED = {
    "seed": 1,
    "scorer": {"_target_": "reward_model", "source": "artifacts/reward", "mean": None},
    "judge": None,
    "doctor": {"actions": {"cooldown": 4}},
    "data": {"batch_size": 64},
}


def test_each_value_that_was_set_is_told_with_what_it_was_and_no_other():
    changed = SHIPPED | {"data": {"batch_size": 8}, "scorer": None}
    keys = ["data.batch_size", "scorer.source"]
    assert find_changes(keys[:1], SHIPPED, changed) == [Change("data.batch_size", "64", "8")]
    assert find_changes(keys, SHIPPED, SHIPPED) == []


def test_a_group_in_place_of_nothing_is_told_key_by_key_and_the_other_way_round():
    changed = SHIPPED | {"judge": {"url": "http://judge"}, "doctor": {"actions": None}}
    assert find_changes(["judge", "doctor.actions"], SHIPPED, changed) == [
        Change("judge.url", "null", "http://judge"),
        Change("doctor.actions.cooldown", "4", "null"),
    ]
