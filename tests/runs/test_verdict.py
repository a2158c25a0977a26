from __future__ import annotations

import math

import pytest

from rlhf_lightning.runs.quantities import duration, number, percent
from rlhf_lightning.runs.summary import GateResult, Summary
from rlhf_lightning.runs.verdict import verdict


def ppo(rate: float, low: float, high: float) -> Summary:
    metrics = {
        "val/gold_win_rate": rate,
        "val/gold_win_rate_low": low,
        "val/gold_win_rate_high": high,
    }
    return Summary("ppo", "completed", 1, metrics=metrics)


@pytest.mark.parametrize(
    ("rate", "low", "high", "tone", "words"),
    [
        (0.8, 0.76, 0.84, "good", "better than SFT"),
        (0.2, 0.16, 0.24, "bad", "worse than SFT"),
        (0.52, 0.47, 0.57, "neutral", "No difference"),
        (0.48, 0.43, 0.53, "neutral", "No difference"),
    ],
)
def test_ppo_is_better_only_if_the_whole_interval_says_so(rate, low, high, tone, words):
    result = verdict(ppo(rate, low, high))
    assert result.tone == result.number_tone == tone
    assert words in result.sentence
    assert result.number == percent(rate)
    assert f"{100 * low:.1f} to {100 * high:.1f} %" in result.caption


def test_without_a_gold_reward_the_verdict_rests_on_the_score_and_is_never_good():
    metrics = {"val/score_win_rate": 0.9, "val/score_win_rate_low": 0.87}
    result = verdict(Summary("ppo", "completed", 1, metrics=metrics))
    assert (result.tone, result.number) == ("neutral", "90.0 %")
    assert "reward it was trained on" in result.sentence
    lost = metrics | {"val/score_win_rate_low": 0.45}
    assert "not shown" in verdict(Summary("ppo", "completed", 1, metrics=lost)).sentence
    rise = verdict(
        Summary("ppo", "completed", 1, metrics={"val/score": 1.5, "val/baseline_score": 0.5})
    )
    assert (rise.tone, rise.number) == ("neutral", "+1.00")


def test_a_reward_model_must_beat_length_alone():
    metrics = {"val/accuracy": 0.62, "val/accuracy_low": 0.59, "val/longer_wins_accuracy": 0.6}
    bad = verdict(Summary("reward", "completed", 1, metrics=metrics))
    assert bad.tone == "bad"
    assert "not shown" in bad.sentence
    good = verdict(Summary("reward", "completed", 1, metrics=metrics | {"val/accuracy_low": 0.61}))
    assert good.tone == "good"
    assert {fact.value for fact in good.facts} >= {"60.0 %"}


def test_sft_shows_the_held_out_loss_against_the_base():
    metrics = {"val/loss": 0.7, "val/baseline_loss": 2.25, "sft/loss": 0.65}
    result = verdict(Summary("sft", "completed", 1, metrics=metrics))
    assert result.number == "0.70"
    assert "2.25 → 0.70" in {fact.value for fact in result.facts}
    assert number(math.exp(0.7)) in result.sentence


def test_a_failed_gate_and_a_failed_run_are_said():
    gates = (GateResult("diversity", 0.3, 0.6, False), GateResult("kl", 0.1, 0.5, True))
    summary = Summary("ppo", "completed", 1, metrics=ppo(0.8, 0.7, 0.9).metrics, gates=gates)
    result = verdict(summary)
    assert result.tone == "bad"
    assert result.number_tone == "good"
    assert "did not pass: diversity." in result.sentence
    assert "failed" in verdict(Summary("ppo", "failed", 1)).sentence
    assert "resume=auto" in verdict(Summary("ppo", "running", 1)).sentence


@pytest.mark.parametrize(
    "stage", ["base", "sft", "reward", "ppo", "collect", "evaluate", "pipeline"]
)
def test_every_stage_has_a_verdict_even_without_metrics(stage):
    assert verdict(Summary(stage, "completed", 1)).number == ""
    odd = {"val/gold_win_rate": None, "val/accuracy": math.nan, "val/loss": None}
    assert verdict(Summary(stage, "completed", 1, metrics=odd)).number == ""


def test_numbers_are_short():
    assert [number(x) for x in (0, 0.5, -0.02, 14.14, 123.4, 3e-5, 2.5e6, -1e-7)] == [
        "0",
        "0.50",
        "-0.0200",
        "14.1",
        "123",
        "3.0e-5",
        "2.5e+6",
        "-1.0e-7",
    ]
    assert number(math.nan) == "not a number"
    assert number(-0.02, like=1.4) == "-0.02"
    assert [duration(s) for s in (0.4, 59.6, 3600, 3725)] == ["0:00", "1:00", "1:00:00", "1:02:05"]


def test_a_pipeline_ends_in_the_verdict_on_its_last_stage_not_in_the_figures_of_all():
    last = ppo(0.8, 0.76, 0.84).metrics
    every = {f"round_1/ppo/figure_{i}": 0.5 for i in range(300)}
    result = verdict(Summary("pipeline", "completed", 1, metrics=last | every))
    assert (result.tone, result.number) == ("good", "80.0 %")
    assert len(result.facts) < 20
    stopped = verdict(Summary("pipeline", "stopped", 1, metrics={"val/accuracy": 0.7} | every))
    assert stopped.number == "70.0 %"
