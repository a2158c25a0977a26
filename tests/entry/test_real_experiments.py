"""The experiments on real data sets: their parts fit together, and they run, on made-up files.

Files of the data sets' formats and a tiny model with a chat template stand in for the real ones;
tests/real runs the same experiments on those.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_lightning.evaluation.gold_rewards import ExactMatchGold, NumberGold
from tests.builders.command_lines import settings_of
from tests.builders.models import config_fields, tiny_policy
from tests.builders.tokenizers import CHATML, build_tokenizer
from tests.entry.test_train import summary, train


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
