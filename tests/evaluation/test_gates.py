"""Gates: what passes, and what is said where something does not."""

from __future__ import annotations

import math

import pytest

from rlhf_lightning.evaluation.gates import check_gates, explain_accuracy, gate_problem

CEILING = {"metric": "val/label_ceiling", "within": 0.03, "where_below": 0.88}
ACCURACY = {"metric": "val/accuracy", "at_least": 0.85, "or_near": CEILING}


def verdict(gate, **metrics):
    (result,) = check_gates({"g": gate}, {f"val/{k}": v for k, v in metrics.items()})
    return result


@pytest.mark.parametrize(
    ("gate", "value", "passed"),
    [
        ({"metric": "val/x", "at_least": 0.7}, 0.7, True),
        ({"metric": "val/x", "at_least": 0.7}, 0.699, False),
        ({"metric": "val/x", "at_most": 0.5}, 0.5, True),
        ({"metric": "val/x", "at_most": 0.5}, 0.501, False),
        ({"metric": "val/x", "above": "val/y"}, 0.6, False),
        ({"metric": "val/x", "above": "val/y"}, 0.601, True),
    ],
)
def test_a_gate_holds_a_metric_against_a_number_or_another_metric(gate, value, passed):
    result = verdict(gate, x=value, y=0.6)
    assert result.passed is passed
    assert result.value == value
    assert "val/x is" in result.reason


@pytest.mark.parametrize(
    ("accuracy", "ceiling", "passed"),
    [
        (0.85, None, True),
        (0.84, None, False),
        (0.84, 0.90, False),  # the labels allow enough for 0.85
        (0.84, 0.87, True),  # exactly 0.03 below
        (0.839, 0.87, False),
        (0.70, 0.72, True),
        (0.855, 0.8799, True),
    ],
)
def test_accuracy_must_reach_its_bound_or_come_near_a_low_ceiling(accuracy, ceiling, passed):
    found = {} if ceiling is None else {"label_ceiling": ceiling}
    assert verdict(ACCURACY, accuracy=accuracy, **found).passed is passed


def test_what_was_not_measured_fails_unless_it_is_optional():
    gate = {"metric": "val/x", "at_least": 0.0}
    assert not verdict(gate).passed
    assert not verdict(gate, x=math.nan).passed
    assert verdict(gate | {"optional": True}).passed
    assert not verdict(gate | {"optional": True}, x=-1.0).passed
    assert not verdict({"metric": "val/x", "above": "val/y"}, x=1.0).passed


@pytest.mark.parametrize(
    ("gate", "problem"),
    [
        ({"metric": "val/x"}, "exactly one of"),
        ({"metric": "val/x", "at_least": float("nan")}, "finite numbers"),
        ({"metric": "val/x", "atleast": 3}, "unknown key atleast"),
    ],
)
def test_a_gate_that_is_none_is_refused(gate, problem):
    assert problem in gate_problem(gate)


@pytest.mark.parametrize(
    ("metrics", "cause"),
    [
        ({"train_accuracy": 0.95, "label_ceiling": 0.93}, "Overfitting: 0.950"),
        ({"label_ceiling": 0.85, "accuracy_high": 0.83}, "Noise: the labels allow no more than"),
        ({"train_accuracy": 0.82, "label_ceiling": 0.93}, "Capacity or too little training"),
        ({"train_accuracy": 0.82}, "Noise or capacity"),
    ],
)
def test_the_cause_of_a_low_accuracy_follows_the_evidence(metrics, cause):
    found = {f"val/{k}": v for k, v in metrics.items()} | {"val/accuracy": 0.8}
    assert explain_accuracy(found.pop("val/accuracy"), found).startswith(cause)
    result = verdict(ACCURACY, accuracy=0.8, **metrics)  # the gate as shipped says so
    assert not result.passed
    assert cause in result.reason


@pytest.mark.parametrize(
    ("gate", "metrics", "attempt"),
    [
        ({"metric": "val/gold_win_rate", "at_least": 0.75},
         {"gold_win_rate": 0.4, "score_win_rate": 0.9}, "pairs of this policy's responses"),
        # the lower end of the interval is no win rate
        ({"metric": "val/gold_win_rate_low", "at_least": 0.7},
         {"gold_win_rate": 0.74, "gold_win_rate_low": 0.64, "score_win_rate": 0.8},
         "a larger evaluation.num_prompts"),
    ],
)  # fmt: skip
def test_a_gate_that_failed_says_what_to_try(gate, metrics, attempt):
    result = verdict(gate, **metrics)
    assert not result.passed
    assert attempt in result.reason


def test_a_ceiling_that_allows_more_than_is_wanted_does_not_raise_the_threshold():
    found = verdict(ACCURACY | {"at_least": 0.5}, accuracy=0.6, label_ceiling=0.87)
    assert found.passed
    assert found.threshold == 0.5
