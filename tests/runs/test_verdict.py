from __future__ import annotations

import math

import pytest

from rlhf_lightning.runs.metric_catalog import duration, number, percent, quantity
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
        (0.52, 0.47, 0.57, "undecided", "no difference"),
        (0.48, 0.43, 0.53, "undecided", "no difference"),
    ],
)
def test_ppo_is_better_only_if_the_whole_interval_says_so(rate, low, high, tone, words):
    result = verdict(ppo(rate, low, high))
    assert result.tone == result.number_tone == tone
    assert words in result.sentence
    assert result.number == percent(rate)
    assert f"{100 * low:.1f} to {100 * high:.1f} %" in result.caption


@pytest.mark.parametrize(
    ("stage", "name"), [("sft", "val/loss"), ("reward", "val/accuracy"), ("ppo", "val/score")]
)
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
    lost = metrics | {"val/score_win_rate_low": 0.45}
    open_ = verdict(Summary("ppo", "completed", 1, metrics=lost | {"val/score_win_rate_high": 1.0}))
    assert open_.tone == open_.number_tone == "undecided"
    assert "Undecided" in open_.sentence
    worse = {
        "val/score_win_rate": 0.4,
        "val/score_win_rate_low": 0.35,
        "val/score_win_rate_high": 0.45,
    }
    assert verdict(Summary("ppo", "completed", 1, metrics=worse)).number_tone == "bad"
    rise = verdict(
        Summary("ppo", "completed", 1, metrics={"val/score": 1.5, "val/baseline_score": 0.5})
    )
    assert (rise.tone, rise.number) == ("neutral", "1.50")


def test_a_reward_model_must_beat_length_alone():
    metrics = {"val/accuracy": 0.62, "val/accuracy_low": 0.59, "val/longer_wins_accuracy": 0.6}
    interval = metrics | {"val/accuracy_high": 0.65}
    unsure = verdict(Summary("reward", "completed", 1, metrics=interval))
    assert unsure.tone == unsure.number_tone == "undecided"
    assert "not shown" in unsure.sentence
    longer = interval | {"val/longer_wins_accuracy": 0.7}
    bad = verdict(Summary("reward", "completed", 1, metrics=longer))
    assert (bad.tone, bad.number_tone) == ("bad", "bad")
    assert "worse than length alone" in bad.sentence
    good = verdict(Summary("reward", "completed", 1, metrics=metrics | {"val/accuracy_low": 0.61}))
    assert good.tone == "good"
    assert {fact.value for fact in good.facts} >= {"60.0 %"}


def test_sft_shows_the_held_out_loss_against_the_base():
    metrics = {"val/loss": 0.7, "val/baseline_loss": 2.25, "sft/loss": 0.65}
    result = verdict(Summary("sft", "completed", 1, metrics=metrics))
    assert result.number == "0.70"
    assert "2.25 → 0.70 nats" in {fact.value for fact in result.facts}
    assert "2.25" in result.sentence


@pytest.mark.parametrize("judge", ["gold", "score"])
def test_a_run_whose_score_never_varied_has_no_win_rate_for_a_headline(judge):
    metrics = {f"val/{judge}_win_rate": 0.7, f"val/{judge}_win_rate_low": 0.6}
    flat = metrics | {"rollout/score_std_max": 0.0}
    result = verdict(Summary("ppo", "completed", 1, metrics=flat))
    assert (result.number, result.tone) == ("", "bad")
    assert "did not vary" in result.sentence
    assert "70.0 %" in {fact.value for fact in result.facts}, "it is among the other figures"
    varied = metrics | {"rollout/score_std_max": 0.1}
    assert verdict(Summary("ppo", "completed", 1, metrics=varied)).number == "70.0 %"


def test_a_score_that_ties_on_every_held_out_prompt_is_no_win_rate_of_one_half():
    metrics = {"val/score_win_rate": 0.5, "val/score_tie_rate": 1.0}
    result = verdict(Summary("evaluate", "completed", 1, metrics=metrics))
    assert result.number == ""
    assert "No win rate" in result.sentence


def test_a_failed_gate_and_a_failed_run_are_said():
    gates = (GateResult("diversity", 0.3, 0.6, False), GateResult("kl", 0.1, 0.5, True))
    summary = Summary("ppo", "completed", 1, metrics=ppo(0.8, 0.7, 0.9).metrics, gates=gates)
    result = verdict(summary)
    assert result.tone == "bad"
    assert result.number_tone == "good"
    assert "Failed gate: diversity." in result.sentence
    assert "failed" in verdict(Summary("ppo", "failed", 1)).sentence
    assert "resume=auto" in verdict(Summary("ppo", "running", 1)).sentence


@pytest.mark.parametrize(
    "stage", ["base", "sft", "reward", "ppo", "collect", "evaluate", "pipeline"]
)
def test_every_stage_has_a_verdict_even_without_metrics(stage):
    assert verdict(Summary(stage, "completed", 1)).number == ""
    odd = {"val/gold_win_rate": None, "val/accuracy": math.nan, "val/loss": None}
    assert verdict(Summary(stage, "completed", 1, metrics=odd)).number == ""


def test_a_collection_says_how_many_records_it_made_and_how_far_to_trust_them():
    made = {"collect/train_records": 8.0, "collect/num_pairs": 40.0, "collect/gold_train": 0.75}
    made |= {"collect/num_candidates": 100.0, "collect/usable_candidates": 60.0}
    told = verdict(Summary("collect", "completed", 1, metrics=made))
    assert (told.number, told.number_tone) == ("8", "neutral")
    assert {"40.0", "0.75"} <= {fact.value for fact in told.facts}
    none = verdict(Summary("collect", "running", 1))
    assert (none.number, none.facts) == ("", ())


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


def test_a_duration_has_its_units():
    shown = ["0.0 s", "0.4 s", "42 s", "1 min 0 s", "6 min 43 s", "1 h 0 min", "1 h 2 min"]
    assert [duration(s) for s in (-1, 0.4, 42.1, 59.6, 403, 3600, 3725)] == shown


def test_a_pipeline_ends_in_the_verdict_on_its_last_stage_not_in_the_figures_of_all():
    last = ppo(0.8, 0.76, 0.84).metrics
    every = {f"round_1/ppo/figure_{i}": 0.5 for i in range(300)}
    result = verdict(Summary("pipeline", "completed", 1, metrics=last | every))
    assert (result.tone, result.number) == ("good", "80.0 %")
    assert len(result.facts) < 20
    stopped = verdict(Summary("pipeline", "stopped", 1, metrics={"val/accuracy": 0.7} | every))
    assert stopped.number == "70.0 %"
    dpo = {"val/accuracy": 0.66, "val/gold_win_rate": 0.3}  # it measures the accuracy of its pairs
    dpo |= {"val/gold_win_rate_low": 0.26, "val/gold_win_rate_high": 0.34}
    result = verdict(Summary("pipeline", "completed", 1, metrics=dpo | every))
    assert (result.tone, result.number) == ("bad", "30.0 %")


@pytest.mark.parametrize("stage", ["evaluate", "pipeline", "ppo"])
@pytest.mark.parametrize("judge", ["judge", "human"])
def test_a_win_rate_by_a_judge_or_by_people_is_the_headline(stage, judge):
    key = f"val/{judge}_win_rate"
    metrics = {key: 0.7, f"{key}_low": 0.6, f"{key}_high": 0.8, f"val/{judge}_num_pairs": 80.0}
    result = verdict(Summary(stage, "completed", 1, metrics=metrics))
    assert (result.tone, result.number) == ("good", "70.0 %")
    scored = metrics | {"val/score_win_rate": 0.9, "val/score_win_rate_low": 0.85}
    assert verdict(Summary(stage, "completed", 1, metrics=scored)).number == "70.0 %"
    by_gold = scored | {"val/gold_win_rate": 0.4}
    result = verdict(Summary("evaluate", "completed", 1, metrics=by_gold))
    assert result.number == "40.0 %"
    assert {"70.0 %", "90.0 %"} <= {fact.value for fact in result.facts}
    assert "40.0 %" not in {fact.value for fact in result.facts}, "the headline is not said twice"


@pytest.mark.parametrize("judge", ["judge", "human"])
def test_skipped_pairs_stand_beside_a_win_rate_wherever_it_is_said(judge):
    key = f"val/{judge}_win_rate"
    metrics = {key: 0.7, f"val/{judge}_num_pairs": 30.0, f"val/{judge}_skipped": 29.0}
    headline = verdict(Summary("evaluate", "completed", 1, metrics=metrics))
    assert "29 of 59" in headline.caption
    beside = verdict(
        Summary("evaluate", "completed", 1, metrics=metrics | {"val/gold_win_rate": 0.4})
    )
    assert "29 of 59" not in beside.caption
    assert sum("29 of 59" in fact.note for fact in beside.facts) == 1


def test_the_best_of_n_is_told_without_a_gold_reward_and_beside_that_of_one_response():
    scores = {"val/score_win_rate": 0.6, "best_of/4/score": 1.5, "best_of/16/score": 2.5}
    scores |= {"best_of/16/pass_at_k": 0.9, "best_of/16/maj_at_k": 0.7}
    result = verdict(Summary("evaluate", "completed", 1, metrics=scores))
    found = {fact.label: fact.value for fact in result.facts}
    assert result.number == "60.0 %"
    assert (found["score, best of 4"], found["score, best of 16"]) == ("1.50", "2.50")
    assert (found["pass@16"], found["maj@16"]) == ("90.0 %", "70.0 %")
    gold = scores | {"best_of/16/gold_win_rate": 0.8, "val/gold_win_rate": 0.7}
    result = verdict(Summary("evaluate", "completed", 1, metrics=gold))
    assert result.number == "80.0 %"
    assert "70.0 %" in {fact.value for fact in result.facts}


@pytest.mark.parametrize(
    ("stage", "phase"), [("reward", "val"), ("pipeline", "val"), ("evaluate", "benchmark")]
)
def test_a_reward_model_that_ranks_wrong_where_the_shorter_is_preferred_is_warned_of(stage, phase):
    key = f"{phase}/accuracy_chosen_shorter"
    metrics = {f"{phase}/accuracy": 0.76, key: 0.377, f"{phase}/num_pairs_chosen_shorter": 40.0}
    result = verdict(Summary(stage, "completed", 1, metrics=metrics))
    assert "37.7 %" in {fact.value for fact in result.facts}
    assert "37.7 % of 40 pairs" in result.sentence
    assert "data.balance_length=true" in result.sentence
    for right in (0.5, 0.607):
        result = verdict(Summary(stage, "completed", 1, metrics=metrics | {key: right}))
        assert "balance_length" not in result.sentence
        assert percent(right) in {fact.value for fact in result.facts}


def test_a_change_that_is_not_seen_in_the_figures_is_not_told():
    kl = {"val/teacher_kl_per_token": 0.2, "val/baseline_teacher_kl_per_token": 0.2000001}
    alike = verdict(Summary("ppo", "completed", 1, metrics=kl))
    assert "No better" in alike.sentence


def test_the_change_of_a_task_has_its_interval_in_points():
    ends = {"": 0.05, "_low": -0.1, "_high": 0.2}
    metrics = {f"benchmark/acc_change{end}/task/x": value for end, value in ends.items()}
    result = verdict(Summary("evaluate", "completed", 1, metrics=metrics))
    assert [(f.value, f.note) for f in result.facts] == [
        ("+5.0 points", "95 % interval -10.0 to +20.0 points")
    ]


def test_a_small_number_beside_a_large_one_is_written_plainly():
    assert number(-5, like=1e6) == "-5.00"
    assert number(2.72, like=1e21) == "2.72"
    assert number(3e6, like=1e21) == "3.0e+6"


def test_a_score_need_not_be_learnt_and_is_not_named_twice():
    metrics = {"val/score_win_rate": 0.9, "val/score_win_rate_low": 0.8}
    result = verdict(Summary("evaluate", "completed", 1, metrics=metrics))
    assert result.sentence.startswith("The policy scores higher than the baseline; read")
    assert "learnt" not in quantity("val/score_win_rate").label


@pytest.mark.parametrize(
    ("stage", "figure", "count", "noun"),
    [
        ("reward", "val/accuracy", "val/num_pairs", "pair"),
        ("evaluate", "benchmark/accuracy", "benchmark/num_pairs", "pair"),
        ("evaluate", "val/human_win_rate", "val/human_num_pairs", "pair"),
        ("ppo", "val/gold_win_rate", "val/num_prompts", "prompt"),
        ("ppo", "val/score_win_rate", "val/num_prompts", "prompt"),
        ("evaluate", "best_of/4/gold_win_rate", "val/num_prompts", "prompt"),
        ("ppo", "val/score", "val/num_prompts", "prompt"),
        ("ppo", "val/teacher_kl_per_token", "val/num_prompts", "prompt"),
    ],
)
def test_a_figure_of_few_prompts_or_pairs_is_no_headline(stage, figure, count, noun):
    metrics = {figure: 0.75, f"{figure}_low": 0.6, f"{figure}_high": 0.8, count: 30.0}
    metrics |= {"val/baseline_teacher_kl_per_token": 1.0, "val/baseline_score": 0.0}
    known = verdict(Summary(stage, "completed", 1, metrics=metrics))
    few = verdict(Summary(stage, "completed", 1, metrics=metrics | {count: 6.0}))
    assert known.number
    assert (few.number, few.tone) == ("", "neutral")
    assert f"6 {noun}s are too few" in few.sentence
    assert known.number in [fact.value for fact in few.facts]
