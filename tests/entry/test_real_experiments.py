"""The experiments on real data sets: their parts fit together, and they run, on made-up files.

Files of the data sets' formats and a tiny model with a chat template stand in for the real ones;
tests/real runs the same experiments on those.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_lightning.evaluation.gold_rewards import ExactMatchGold, NumberGold
from rlhf_lightning.rollout.scorers.verifiable import NumberReward
from tests.builders.command_lines import settings_of
from tests.builders.models import config_fields, tiny_policy
from tests.builders.record_files import write_arguments
from tests.builders.tokenizers import CHATML, build_tokenizer
from tests.entry.test_train import summary, train

EXPERIMENTS = (
    "reward_smollm2_arguments",
    "sft_smollm2_shell",
    "sft_smollm2_gsm8k",
    "ppo_smollm2_gsm8k",
)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_target_is_allowed_and_every_hyper_parameter_in_range(experiment):
    settings = settings_of(f"+experiment={experiment}", "dataset.path=x")
    assert settings.artifacts.publish.startswith(settings.paths.artifacts)


def test_the_reward_and_the_judge_of_word_problems_read_the_same_column():
    words = ["dataset.path=x", "dataset.reward.fallback=last_number"]
    settings = settings_of("+experiment=ppo_smollm2_gsm8k", *words)
    scorer, gold = settings.scorer.build(), settings.evaluation.gold.build()
    assert isinstance(gold, NumberGold)
    assert scorer.function == gold.reward == NumberReward(fallback="last_number")
    assert scorer.name == "right_number"
    assert scorer.build() == []


def test_policies_with_a_right_answer_are_judged_by_their_likeliest_answer_before_and_after():
    for experiment in ("sft_smollm2_shell", "sft_smollm2_gsm8k"):
        evaluation = settings_of(f"+experiment={experiment}", "dataset.path=x").evaluation
        assert evaluation.temperature == 0.0
        assert isinstance(evaluation.gold.build(), ExactMatchGold | NumberGold)


# -- what follows trains ------------------------------------------------------------------------

SMALL = (
    "logger=none",
    "trainer.precision=32-true",
    "trainer.limit_train_batches=2",
    "evaluation.num_prompts=6",
    "evaluation.batch_size=6",
    "evaluation.max_new_tokens=6",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(template=CHATML)
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    fields = config_fields("llama", vocab_size=len(tokenizer), max_position_embeddings=512, **ids)
    tiny_policy(**fields).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_reward_model_of_argument_pairs_reports_strict_and_length_matched_accuracy(
    model, tmp_path
):
    (tmp_path / "data").mkdir()
    path = write_arguments(tmp_path / "data", zipped=True)
    held_out = "dataset.source.held_out=[cats-or-dogs]"
    settings = ("data.batch_size=4", "module.reward.normalization_samples=4")
    done = train(
        tmp_path,
        "+experiment=reward_smollm2_arguments",
        f"dataset.path={path}",
        f"artifacts.sft={model}",
        held_out,
        *settings,
        *SMALL,
    )
    metrics = summary(tmp_path, "reward_smollm2_arguments")["metrics"]
    assert metrics["val/num_pairs/subset/strict"] == 4
    assert metrics["val/num_pairs/domain/cats-or-dogs_cats"] == 4
    assert 0 <= metrics["val/accuracy/subset/strict"] <= 1
    assert "val/longer_wins_accuracy/subset/strict" in metrics
    assert metrics["val/num_pairs_chosen_longer"] + metrics["val/num_pairs_chosen_shorter"] == 8
    assert "dropped: tie: people found neither" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_shell_commands_are_matched_before_and_after_training(model, tmp_path):
    rows = [
        {"platform": "linux", "page": f"p{i}", "about": "A.", "prompt": "do", "completion": f"p{i}"}
        for i in range(60)
    ]
    train(
        tmp_path,
        "+experiment=sft_smollm2_shell",
        f"dataset.path={write_rows(tmp_path / 'rows.jsonl', rows)}",
        f"artifacts.base={model}",
        "dataset.source.validation_fraction=0.2",
        "data.batch_size=4",
        *SMALL,
    )
    metrics = summary(tmp_path, "sft_smollm2_shell")["metrics"]
    for key in ("exact_match", "first_word_match", "baseline_exact_match"):
        assert 0 <= metrics[f"val/{key}"] <= 1
    assert metrics["val/gold"] == metrics["val/exact_match"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ppo_on_word_problems_pays_for_the_right_number_without_a_reward_model(model, tmp_path):
    rows = [
        {"question": f"what is {i}?", "answer": f"it is <<{i}>>{i}\n#### {i}"} for i in range(60)
    ]
    common = (f"dataset.path={write_rows(tmp_path / 'rows.jsonl', rows)}", "data.batch_size=4")
    train(tmp_path, "+experiment=sft_smollm2_gsm8k", f"artifacts.base={model}", *common, *SMALL)
    sft = summary(tmp_path, "sft_smollm2_gsm8k")["metrics"]
    assert {"val/solved", "val/baseline_solved", "val/answered"} <= set(sft)
    train(
        tmp_path,
        "+experiment=ppo_smollm2_gsm8k",
        "data.max_prompt_length=200",
        "module.sampling.max_new_tokens=6",
        "dataset.reward.wrong=-0.5",
        "module.ppo.critic_warmup_iterations=0",
        *common,
        *SMALL[:-1],
    )
    ppo = summary(tmp_path, "ppo_smollm2_gsm8k")["metrics"]
    solved = ppo["val/solved"]
    assert ppo["val/score"] == pytest.approx(1.0 * solved - 0.5 * (1 - solved))
    assert ppo["val/gold"] == solved
