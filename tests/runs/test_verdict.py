from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlhf_lightning.runs.metric_catalog import percent
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
        (0.8, 0.76, 0.84, "good", "better than the base"),
        (0.2, 0.16, 0.24, "bad", "worse than the base"),
        (0.52, 0.47, 0.57, "undecided", "nothing shows"),
    ],
)
def test_ppo_is_better_only_if_the_whole_interval_says_so(rate, low, high, tone, words):
    result = verdict(ppo(rate, low, high))
    assert result.tone == result.number_tone == tone
    assert words in result.sentence
    assert result.number == percent(rate)


@pytest.mark.parametrize(("stage", "name"), [("sft", "val/loss"), ("ppo", "val/score")])
def test_a_figure_that_is_broken_is_not_one_that_was_not_taken(stage, name):
    assert verdict(Summary(stage, "completed", 1)).tone == "neutral"
    for value in (math.nan, math.inf, None):
        broken = verdict(Summary(stage, "completed", 1, metrics={name: value}))
        assert (broken.tone, broken.sentence) == ("bad", f"{name} is not a finite number.")


def test_without_a_gold_reward_the_verdict_rests_on_the_score_and_is_never_good():
    metrics = {"val/score_win_rate": 0.9, "val/score_win_rate_low": 0.87}
    metrics["rollout/score_std_max"] = 1.0
    result = verdict(Summary("ppo", "completed", 1, metrics=metrics))
    assert (result.tone, result.number) == ("neutral", "90.0 %")
    assert "reward it was trained on" in result.sentence
    same = {"val/score_win_rate": 0.5, "val/score_tie_rate": 1.0}
    result = verdict(Summary("ppo", "completed", 1, metrics=metrics | same))
    assert (result.tone, result.number) == ("bad", "")
    lost = metrics | {"val/score_win_rate_low": 0.45}
    open_ = verdict(Summary("ppo", "completed", 1, metrics=lost | {"val/score_win_rate_high": 1.0}))
    assert open_.tone == open_.number_tone == "undecided"
    assert "Undecided" in open_.sentence
    scores = {"val/score": 1.5, "val/baseline_score": 0.5}
    rise = verdict(Summary("ppo", "completed", 1, metrics=scores))
    assert (rise.tone, rise.number) == ("neutral", "1.50")


def test_a_reward_model_must_beat_length_alone():
    metrics = {"val/accuracy": 0.62, "val/accuracy_low": 0.59, "val/longer_wins_accuracy": 0.6}
    interval = metrics | {"val/accuracy_high": 0.65}
    unsure = verdict(Summary("reward", "completed", 1, metrics=interval))
    assert unsure.tone == unsure.number_tone == "undecided"
    assert "nothing shows" in unsure.sentence
    longer = interval | {"val/longer_wins_accuracy": 0.7}
    bad = verdict(Summary("reward", "completed", 1, metrics=longer))
    assert (bad.tone, bad.number_tone) == ("bad", "bad")
    assert "worse than length alone" in bad.sentence
    good = verdict(Summary("reward", "completed", 1, metrics=metrics | {"val/accuracy_low": 0.61}))
    assert good.tone == "good"
    assert {fact.value for fact in good.facts} >= {"60.0 %"}


def test_a_run_whose_score_never_varied_has_no_win_rate_for_a_headline():
    metrics = {"val/gold_win_rate": 0.7, "val/gold_win_rate_low": 0.6}
    flat = metrics | {"rollout/score_std_max": 0.0}
    result = verdict(Summary("ppo", "completed", 1, metrics=flat))
    assert (result.number, result.tone) == ("", "bad")
    assert "did not vary" in result.sentence
    assert "70.0 %" in {fact.value for fact in result.facts}, "it is among the other figures"
    varied = metrics | {"rollout/score_std_max": 0.1}
    assert verdict(Summary("ppo", "completed", 1, metrics=varied)).number == "70.0 %"


def test_the_doctor_s_alerts_that_remain_and_a_warning_stand_behind_the_figure():
    ends = (("a", None), ("b", 7), ("c", None))
    alerts = tuple({"message": f"It {k} [warn]: 1", "cleared_at": v} for k, v in ends)
    told = verdict(replace(ppo(0.8, 0.7, 0.9), warning="9 steps.", alerts=alerts))
    assert told.sentence.endswith("reward. 9 steps. But the doctor warns: it a; it c.")
    assert (told.tone, told.number_tone, told.number) == ("neutral", "neutral", "80.0 %")


def test_a_failed_gate_and_a_failed_run_are_said():
    gates = (GateResult("diversity", 0.3, 0.6, False), GateResult("kl", 0.1, 0.5, True))
    summary = Summary("ppo", "completed", 1, metrics=ppo(0.8, 0.7, 0.9).metrics, gates=gates)
    result = verdict(summary)
    assert result.tone == "bad"
    assert result.number_tone == "good"
    assert "Failed gates: diversity." in result.sentence
    assert "failed" in verdict(Summary("ppo", "failed", 1)).sentence
    assert "resume=auto" in verdict(Summary("ppo", "running", 1)).sentence


@pytest.mark.parametrize(
    ("stage", "figure", "count", "noun"),
    [
        ("reward", "val/accuracy", "val/num_pairs", "pair"),
        ("dpo", "val/accuracy", "val/num_pair_prompts", "prompt"),
        ("ppo", "val/gold_win_rate", "val/num_prompts", "prompt"),
    ],
)
def test_a_figure_of_few_prompts_or_pairs_is_no_headline(stage, figure, count, noun):
    metrics = {figure: 0.75, f"{figure}_low": 0.6, f"{figure}_high": 0.8}
    metrics |= {"val/num_pairs": 31.0, count: 30.0}
    known = verdict(Summary(stage, "completed", 1, metrics=metrics))
    few = verdict(Summary(stage, "completed", 1, metrics=metrics | {count: 6.0}))
    assert known.number
    of = "31 held-out pairs of 30 prompts ranked"
    assert (of in known.caption) == (count == "val/num_pair_prompts")
    assert (few.number, few.tone) == ("", "neutral")
    assert f"6 {noun}s are too few" in few.sentence
    assert known.number in [fact.value for fact in few.facts]


def test_a_headline_counts_equal_responses_and_no_prompts_without_a_score():
    metrics = ppo(1.0, 0.6, 1.0).metrics | {"val/num_prompts": 400.0, "val/gold_unscored": 0.9875}
    assert "5 prompts are too few" in verdict(replace(ppo(1, 1, 1), metrics=metrics)).sentence
    judged = {"win_rate": 0.5, "num_pairs": 20.0, "identical_rate": 0.5}
    metrics = {f"val/judge_{name}": value for name, value in judged.items()}
    assert "on 40 prompts won" in verdict(replace(ppo(1, 1, 1), metrics=metrics)).caption
