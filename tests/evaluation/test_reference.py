"""Judges with a right answer: what counts as right, and how the references reach them."""

from __future__ import annotations

import math

import pytest

from rlhf_lightning.evaluation.generate import Sampling, sample_batches
from rlhf_lightning.evaluation.gold_rewards import CommandGold, ExactMatchGold, NumberGold
from rlhf_lightning.evaluation.held_out import HeldOutComparison, Side
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.scorers.verifiable import NumberReward, command_reward
from tests.builders.models import EOS, PAD, prompt_batch, prompt_rows, tiny_policy, tiny_tokenizer


def test_an_answer_is_right_if_it_is_the_reference_but_for_white_space():
    answers = {
        "ls -l {{file}}": 1.0,
        " ls  -l\n{{file}} ": 1.0,
        "ls -l": 0.0,
        "ls -L {{file}}": 0.0,
        "": 0.0,
    }
    scores = ExactMatchGold()(
        ["p"] * 5, list(answers), [True] * 5, completion=["ls -l {{file}}"] * 5
    )
    assert scores == list(answers.values())


def test_a_right_number_is_worth_1_whatever_the_reward_pays():
    gold = NumberGold(NumberReward(right=5.0, wrong=-1.0, answered=0.5))
    completions = ["#### 72", "#### 7", "72"]
    answers = {"answer": ["so #### 72"] * 3}
    assert gold(["p"] * 3, completions, [True] * 3, **answers) == [1.0, 0.0, 0.0]
    details = gold.details(["p"] * 3, completions, [False] * 3, **answers)
    assert details == {"solved": [1.0, 0.0, 0.0], "answered": [1.0, 1.0, 0.0]}


def test_a_command_is_worth_its_program_and_the_share_of_its_arguments():
    right = ["tar -x -f {{file}}"] * 4 + ["ls", "", ""]
    answers = ["tar -x -f {{file}}", "tar -x", "zip -x", "", "ls", "ls", ""]
    worth = [1.0, pytest.approx(0.5 + 0.5 * 2 / 4), 0.0, 0.0, 1.0, 0.0, 0.0]
    assert CommandGold()(["p"] * 7, answers, [False] * 7, completion=right) == worth
    columns = {"completion": right, "platform": ["linux"] * 7}
    assert command_reward(["p"] * 7, answers, **columns) == worth


@pytest.fixture
def sampling():
    return Sampling(CachedGenerator((EOS,), PAD), tiny_tokenizer(), 1.0, max_new_tokens=6)


def batches(**columns):
    rows = prompt_rows([4, 6, 5, 3])
    return [
        prompt_batch(rows[:2], **{k: v[:2] for k, v in columns.items()}),
        prompt_batch(rows[2:], first_row=2, **{k: v[2:] for k, v in columns.items()}),
    ]


def compare(policy, baseline, sampling, gold, **columns):
    comparison = HeldOutComparison([Side(batches(**columns), sampling)], seed=1, gold=gold)
    mine, theirs = comparison.ask_policy(policy, baseline), comparison.ask_baseline(baseline)
    return comparison.measure(mine, theirs)


def test_references_come_from_the_columns_of_the_prompts_row_by_row(sampling):
    policy, baseline = tiny_policy(seed=1), tiny_policy(seed=2)
    mine = sample_batches(policy, batches(), sampling, noise=RowNoise(1, "evaluation"))
    assert all(map(math.isnan, mine.scores)), "nothing scored them"
    # The policy's own answers are the references of three prompts of four.
    references = [*mine.completions[:3], "w2 w3 w4 w5 w6 w7 w8"]
    metrics = compare(policy, baseline, sampling, ExactMatchGold(), completion=references)
    ended = [float(done) for done in mine.finished[:3]]
    assert metrics["val/gold"] == metrics["val/exact_match"] == pytest.approx(sum(ended) / 4)
    assert metrics["val/first_word_match"] >= 3 / 4
    assert metrics["val/baseline_exact_match"] < 3 / 4
    assert metrics["val/baseline_gold"] == metrics["val/baseline_exact_match"]


def test_a_column_that_no_prompt_has_is_an_error_and_not_a_score_of_0(sampling):
    with pytest.raises(ValueError, match=r"column 'completion', prompts have \['prompt'\]"):
        compare(tiny_policy(seed=1), tiny_policy(seed=2), sampling, ExactMatchGold())
