"""What is measured of two policies' answers to the same prompts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rlhf_lightning.evaluation.generate import side_by_side
from rlhf_lightning.evaluation.metrics import measure_sides, wins
from rlhf_lightning.evaluation.win_rate import mean_over_prompts, share_over_prompts
from rlhf_lightning.functional.statistics import wilson_interval
from tests.evaluation.spoken import answers, part


def words_gold(prompts, completions, finished):
    return [float(len(text.split())) for text in completions]


def test_every_judge_has_a_win_rate_with_its_interval_and_the_ties():
    mine = answers(["a b c", "a b", "a", "a b"], scores=[1.0, 0.0, 0.0, 2.0])
    theirs = answers(["a", "a", "a", "a b c"], scores=[0.0, 1.0, 1.0, 0.0])
    found = measure_sides(mine, theirs, seed=1, gold=words_gold, scored=True)
    assert found["val/gold_win_rate"] == 2.5 / 4
    assert found["val/gold_tie_rate"] == 1 / 4
    assert found["val/score_win_rate"] == 2 / 4
    low, high = wilson_interval(2.5, 4, confidence=0.95)
    assert (found["val/gold_win_rate_low"], found["val/gold_win_rate_high"]) == (low, high)
    assert found["val/gold"] == 2.0
    assert found["val/baseline_gold"] == 1.5
    assert found["val/num_prompts"] == 4


def test_the_kl_of_a_response_is_the_mean_over_responses_and_that_of_a_token_over_tokens():
    kl = [1.0, 2.0, 3.0, 6.0]
    mine = replace(answers(["a b", "a", "a b c", "a"]), kl=kl, teacher_kl=[6.0, 1.0, 2.0, 7.0])
    mine.answers_per_prompt = 2
    theirs = replace(answers(["a", "b c d e"]), teacher_kl=[3.0, 5.0])
    found = measure_sides(mine, theirs, seed=1)
    assert mine.lengths == [3, 2, 4, 2]
    assert found["val/kl_per_response"] == 3
    by_prompt = mean_over_prompts([1.5, 4.5])
    assert found["val/kl_per_response_low"] == pytest.approx(by_prompt.low)
    assert (
        found["val/kl_per_token_low"] < found["val/kl_per_token"] < found["val/kl_per_token_high"]
    )
    assert found["val/kl_per_token"] == pytest.approx(12 / 11)
    assert found["val/teacher_kl_per_token"] == pytest.approx(16 / 11)
    assert found["val/baseline_teacher_kl_per_token"] == pytest.approx(8 / 7)
    assert found["val/teacher_kl_share"] == pytest.approx(16 / 11 / (8 / 7))


def test_no_name_of_a_domain_touches_the_figures_of_all_prompts_or_of_another_domain():
    names = ["low", "high", "length_controlled", "x", "x_low", "domain/x", "", "x"]
    mine = answers(["a"] * 8)
    theirs = answers(["b"] * 8)
    scores = [1, 1, 1, 0, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0, 0, 0]
    alone = wins("gold", mine, theirs, *scores)
    found = wins("gold", replace(mine, domains=names), replace(theirs, domains=names), *scores)
    assert {name: found[name] for name in alone} == alone
    assert found["val/gold_win_rate/domain/low"] == 1.0
    assert found["val/gold_win_rate/domain/x"] == 0.25
    assert found["val/gold_win_rate_low/domain/x"] < 0.25
    assert found["val/gold_win_rate/domain/x_low"] == 1.0
    assert len(found) == len(alone) + 3 * 6, "each domain has a rate and two bounds of its own"


class Rubric:
    """A gold reward whose details are called as other figures are."""

    columns = ()

    def __call__(self, prompts, completions, finished):
        return words_gold(prompts, completions, finished)

    def details(self, prompts, completions, finished):
        names = ("score", "gold", "gold_win_rate_low", "baseline_score", "num_prompts", "solved")
        return dict.fromkeys(names, [7.0] * len(prompts))


class Solved:
    """A gold reward of right and wrong."""

    columns = ()

    def __call__(self, prompts, completions, finished):
        return [float(text == "a") for text in completions]

    def details(self, prompts, completions, finished):
        return {"solved": self(prompts, completions, finished)}


def test_gold_and_what_is_solved_have_intervals_over_prompts_with_several_responses():
    mine = answers(["a", "a", "a", "b", "b", "b"], answers_per_prompt=2)
    theirs = answers(["a", "b", "b"])
    found = measure_sides(mine, theirs, seed=1, gold=Solved())
    shares = np.array([1.0, 0.5, 0.0])
    for name, wanted in (
        ("val/solved", share_over_prompts(shares)),
        ("val/gold", mean_over_prompts(shares)),
        ("val/baseline_gold", mean_over_prompts([1.0, 0.0, 0.0])),
        ("val/baseline_solved", (1 / 3, *wilson_interval(1, 3, confidence=0.95))),
    ):
        assert [found[f"{name}{end}"] for end in ("", "_low", "_high")] == pytest.approx(wanted)


def test_no_detail_of_a_gold_reward_overwrites_another_figure():
    mine, theirs = answers(["a b"], scores=[1.0]), answers(["a"], scores=[0.0])
    alone = measure_sides(mine, theirs, seed=1, gold=words_gold, scored=True)
    found = measure_sides(mine, theirs, seed=1, gold=Rubric(), scored=True)
    assert {name: found[name] for name in alone} == alone
    for name in ("score", "gold", "gold_win_rate_low", "baseline_score", "num_prompts"):
        assert found[f"val/gold/{name}"] == found[f"val/baseline_gold/{name}"] == 7.0
    assert found["val/solved"] == found["val/baseline_solved"] == 7.0, "one of ours"


def test_with_several_answers_every_answer_meets_every_other_of_its_prompt():
    mine = answers(["a", "b", "c", "d"], answers_per_prompt=2)
    theirs = answers(["e", "f", "g", "h"], answers_per_prompt=2)
    found = wins("gold", mine, theirs, [3, 1, 0, 0], [2, 0, 0, 1])
    # Prompt 1: 3 of 4 meetings won. Prompt 2: two ties, two losses.
    assert found["val/gold_win_rate"] == pytest.approx((0.75 + 0.25) / 2)
    assert found["val/gold_tie_rate"] == pytest.approx(2 / 8)
    ends = share_over_prompts(np.array([0.75, 0.25]))[1:]
    assert (found["val/gold_win_rate_low"], found["val/gold_win_rate_high"]) == pytest.approx(ends)
    assert mine.num_prompts == 2


def test_a_collapsed_policy_is_seen_in_every_measure_of_variety():
    texts = [f"a{i} b{i} c{i} d{i} e{i}" for i in range(20)]
    found = measure_sides(answers(["x y x y x y"] * 20), answers(texts), seed=1)
    assert found["val/unique_fraction"] == 1 / 20
    assert found["val/most_common_fraction"] == 1.0
    assert found["val/self_bleu"] == pytest.approx(1.0)
    assert found["val/repetition"] > 0.2
    assert found["val/baseline_unique_fraction"] == 1.0
    assert found["val/baseline_most_common_fraction"] == 1 / 20
    assert found["val/baseline_self_bleu"] < 0.3
    assert found["val/baseline_repetition"] == 0.0
    for n in (1, 2, 3):
        assert found[f"val/distinct_{n}"] < 0.1 < found[f"val/baseline_distinct_{n}"]


def test_prompts_without_a_score_are_left_out_of_the_rate_and_counted():
    nan = math.nan
    scores = [1.0, nan, 0.0, 1.0], [0.0, 0.0, nan, 1.0]
    mine = answers(["a", "a b", "a", "a"], scores=scores[0], domains=["x", "x", "y", ""])
    theirs = answers(["b", "b", "b", "b c"], scores=scores[1])
    found = measure_sides(mine, theirs, seed=1, scored=True)
    kept = [0, 3]
    alone = measure_sides(part(mine, kept), part(theirs, kept), seed=1, scored=True)
    rates = [name for name in found if name.startswith(("val/score_win", "val/score_tie"))]
    assert found["val/score_unscored"] == 0.5
    assert {name: found[name] for name in rates} == {name: alone[name] for name in rates}
    assert found["val/score"] == pytest.approx(2 / 3)
    assert found["val/baseline_score"] == pytest.approx(1 / 3)
    shown = side_by_side(mine, theirs, 4)
    assert [row["score"] for row in shown] == [1.0, None, 0.0, 1.0]
    nothing = answers(["a"], scores=[nan])
    found = measure_sides(nothing, answers(["b"], scores=[1.0]), seed=1, scored=True)
    assert found["val/score_unscored"] == 1.0
    assert "val/score_win_rate" not in found
    assert "val/score" not in found
