"""Gates: what passes, and what is said where something does not."""

from __future__ import annotations

import math

import pytest

from rlhf_lightning.evaluation.gates import check_gates, explain_accuracy, gate_problem
from rlhf_lightning.evaluation.root_cause import find_blame
from rlhf_lightning.runs.summary import GateResult

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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_a_figure_that_is_not_finite_is_not_one_that_need_not_be_measured(value):
    for gate in ({"metric": "val/x", "at_least": 0.0}, {"metric": "val/x", "at_most": 0.0}):
        found = verdict(gate | {"optional": True}, x=value)
        assert found.word == "NOT PASSED"
        assert found.reason == "val/x is not a finite number"
    found = verdict({"metric": "val/y", "above": "val/x", "optional": True}, x=value, y=1.0)
    assert not found.passed


@pytest.mark.parametrize(
    ("gate", "problem"),
    [
        ({"metric": "val/x"}, "exactly one of"),
        ({"metric": "val/x", "at_least": 1, "at_most": 2}, "exactly one of"),
        ({"at_least": 1}, "needs metric"),
        ({"metric": "val/x", "at_least": "much"}, "must be a number"),
        ({"metric": "val/x", "at_least": True}, "must be a number"),
        ({"metric": "val/x", "above": 3}, "must be the name of a metric"),
        ({"metric": "val/x", "atleast": 3}, "unknown key atleast"),
        ({"metric": "val/x", "at_most": 3, "or_near": CEILING}, "or_near goes with at_least"),
        ({"metric": "val/x", "at_least": 3, "or_near": {"metric": "y"}}, "has the keys"),
        (None, "must be a group"),
    ],
)
def test_a_gate_that_is_none_is_refused(gate, problem):
    assert problem in gate_problem(gate)
    if gate is not None:
        with pytest.raises(ValueError, match="gate g"):
            check_gates({"g": gate}, {})


@pytest.mark.parametrize(
    ("metrics", "cause"),
    [
        ({"train_accuracy": 0.95, "label_ceiling": 0.93}, "Overfitting: 0.950"),
        ({"label_ceiling": 0.85, "accuracy_high": 0.83}, "Noise: the labels allow no more than"),
        ({"label_ceiling": 0.85, "accuracy_high": 0.81}, "Capacity or too little training"),
        ({"label_ceiling": 0.85}, "Noise: the labels allow no more than 0.850, and up to 0.830"),
        ({"label_ceiling": 0.95, "larger_model_accuracy": 0.805}, "Too little training: the lab"),
        ({"label_ceiling": 0.95, "larger_model_accuracy": 0.85}, "Capacity: a larger model"),
        ({"train_accuracy": 0.82, "label_ceiling": 0.93}, "Capacity or too little training"),
        ({"train_accuracy": 0.82, "larger_model_accuracy": 0.85}, "Capacity: a larger model"),
        ({"train_accuracy": 0.82, "larger_model_accuracy": 0.805}, "Noise: a larger model"),
        ({"train_accuracy": 0.82}, "Noise or capacity"),
        ({}, "Noise or capacity: train a larger model"),
    ],
)
def test_the_cause_of_a_low_accuracy_follows_the_evidence(metrics, cause):
    found = {f"val/{k}": v for k, v in metrics.items()} | {"val/accuracy": 0.8}
    assert explain_accuracy(found.pop("val/accuracy"), found).startswith(cause)
    result = verdict(ACCURACY, accuracy=0.8, **metrics)  # the gate as shipped says so
    assert not result.passed
    assert cause in result.reason


def failed(**values):
    return [
        GateResult(name, value, 0.5, False, f"{name} is {value}") for name, value in values.items()
    ]


@pytest.mark.parametrize(
    ("stage", "gates", "metrics", "blamed"),
    [
        ("ppo", {"kl_per_token": 1.2}, {"ppo": {"val/kl_per_token": 1.2}}, "ppo"),
        ("ppo", {"gold_win_rate": 0.5}, {"ppo": {"val/kl_per_token": 0.001}}, "ppo"),
        (
            "ppo",
            {"gold_win_rate": 0.4},
            {"ppo": {"val/kl_per_token": 0.4, "val/score_win_rate": 0.9}},
            "reward",
        ),
        (
            "ppo",
            {"gold_win_rate": 0.74, "gold_win_rate_low": 0.7},
            {"ppo": {"val/kl_per_token": 0.15, "val/score_win_rate": 0.84}},
            "ppo",
        ),
        (
            "evaluate",
            {"gold_win_rate": 0.55},
            {"evaluate": {"val/kl_per_token": 0.1, "val/score_win_rate": 0.55}},
            "ppo",
        ),
        (
            "ppo",
            {"still_refuses": -0.3},
            {"ppo": {}, "reward": {"val/accuracy": 0.9, "val/accuracy/domain/harmful": 0.7}},
            "reward",
        ),
        (
            "ppo",
            {"still_refuses": -0.3},
            {"ppo": {}, "reward": {"val/accuracy": 0.9, "val/accuracy/domain/harmful": 0.9}},
            "ppo",
        ),
        (  # the lower end of the interval is no win rate
            "ppo",
            {"gold_win_rate": 0.74, "gold_win_rate_low": 0.64},
            {
                "ppo": {
                    "val/kl_per_token": 0.15,
                    "val/score_win_rate": 0.80,
                    "val/gold_win_rate": 0.74,
                }
            },
            "ppo",
        ),
        (
            "ppo",
            {"gold_win_rate_low": 0.64},
            {"ppo": {"val/score_win_rate": 0.80, "val/gold_win_rate": 0.76}},
            "ppo",
        ),
        ("reward", {"beats_length": 0.6}, {"reward": {}}, "labels"),
        ("reward", {"beats_length": 0.5, "accuracy": 0.5}, {"reward": {}}, "reward"),
        ("reward", {"accuracy": 0.6}, {"reward": {}}, "reward"),
        ("sft", {"beats_base": 0.5}, {"sft": {"val/eos_fraction": 0.4}}, "sft"),
    ],
)
def test_the_stage_to_blame_is_the_one_the_evidence_points_at(stage, gates, metrics, blamed):
    blame = find_blame(stage, failed(**gates), metrics)
    assert blame.stage == blamed
    assert blame.why
    assert blame.attempt


def test_a_policy_without_a_learnt_reward_is_not_said_to_follow_one():
    own = {"val/kl_per_token": 0.03, "val/gold_win_rate": 0.41}
    blame = find_blame("dpo", failed(gold_win_rate=0.41), {"dpo": own})
    assert "0.41" in blame.why
    assert "learnt reward" not in blame.why
    assert "unknown" not in blame.why
    assert "more iterations" not in blame.attempt  # it is worse than its start


@pytest.mark.parametrize("stage", ["grpo", "dpo"])
def test_the_remedy_is_of_the_objective_that_trained_the_policy(stage):
    own = {"val/score_win_rate": 0.6, "val/kl_per_token": 3.0}
    lever = f"a larger module.{stage}.{'beta' if stage == 'dpo' else 'kl_coef'}"
    gates = failed(kl_per_token=3.0)
    assert lever in find_blame(stage, gates, {stage: own}).attempt
    assert lever in find_blame("evaluate", gates, {"evaluate": own}, policy_stage=stage).attempt


@pytest.mark.parametrize("rate", [0.4, 0.9])
def test_an_objective_of_another_package_is_blamed_as_ours_are(rate):
    own = {"val/score_win_rate": rate, "val/gold_win_rate": 0.4, "val/kl_per_token": 3.0}
    for gates, attempt in (
        (failed(kl_per_token=3.0), "a larger weight of the KL penalty"),
        (failed(gold_win_rate=0.4), "pairs of this policy" if rate == 0.9 else "more iterations"),
    ):
        for stage in ("mine", "evaluate"):
            blame = find_blame(stage, gates, {stage: own}, policy_stage="mine")
            assert attempt in blame.attempt
            assert blame.stage == ("reward" if "pairs" in attempt else "mine")


def test_what_was_not_measured_is_no_evidence_and_is_named():
    own = {"val/score_win_rate": 0.8, "val/kl_per_token": 0.2}
    gates = {"gold_win_rate": {"metric": "val/gold_win_rate", "at_least": 0.75}}
    blame = find_blame("ppo", check_gates(gates, own), {"ppo": own})
    assert blame.stage == "ppo"
    assert "val/gold_win_rate was not measured" in blame.why
    gates["kl_per_token"] = {"metric": "val/kl_per_token", "at_most": 0.1}
    blame = find_blame("ppo", check_gates(gates, own), {"ppo": own})
    assert (
        blame.why
        == "The policy is 0.200 nats a token away from its start (not measured: gold_win_rate)"
    )


def test_a_model_that_learnt_nothing_is_not_blamed_on_the_lengths_of_its_pairs():
    found = {"val/accuracy": 0.5, "val/longer_wins_accuracy": 0.56, "val/label_ceiling": 0.95}
    beats = {"metric": "val/accuracy", "above": "val/longer_wins_accuracy"}
    gates = check_gates({"accuracy": ACCURACY, "beats_length": beats}, found)
    blame = find_blame("reward", gates, {"reward": found})
    assert blame.stage == "reward"
    assert "Capacity or too little training: the labels allow 0.950" in blame.why


def test_noise_in_the_labels_is_blamed_on_the_labels():
    (result,) = check_gates(
        {"accuracy": ACCURACY},
        {"val/accuracy": 0.6, "val/train_accuracy": 0.61, "val/larger_model_accuracy": 0.6},
    )
    blame = find_blame("reward", [result], {"reward": {}})
    assert blame.stage == "labels"
    assert "more raters a pair" in blame.attempt


def test_nothing_is_blamed_where_all_gates_passed():
    assert find_blame("ppo", [GateResult("kl", 0.1, 0.5, True)], {}) is None
