"""The experiments on real data run with the real model: two iterations of two rows each.

The model is taken from RLHF_SMOLLM2, or from the cache in the home folder; the data sets from
RLHF_DATA, or from `shared/data` beside the repository.
"""

from __future__ import annotations

import pytest

from tests.builders.real_sets import EXPERIMENTS, FILES, source_of
from tests.entry.test_train import summary, train
from tests.real.test_smollm2 import FOLDER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not (FOLDER / "model.safetensors").is_file(),
        reason=f"SmolLM2-135M-Instruct is not in {FOLDER}: set RLHF_SMOLLM2 to its folder",
    ),
]

SMALL = (
    "logger=none",
    "trainer.limit_train_batches=2",
    "data.batch_size=2",
    "evaluation.num_prompts=4",
    "callbacks.checkpoint.every_n_iterations=1000",
)


def run(folder, name, *overrides, experiment=None):
    if not FILES[name].exists():
        pytest.skip(f"the data set is not in {FILES[name]}: set RLHF_DATA to the folder above it")
    experiment = experiment or EXPERIMENTS[name]
    path = f"dataset.path={FILES[name]}"
    train(folder, f"+experiment={experiment}", path, *SMALL, *overrides, timeout=1000)
    return summary(folder, experiment)["metrics"]


def test_a_reward_model_of_arguments(tmp_path):
    metrics = run(
        tmp_path,
        "arguments",
        f"artifacts.sft={FOLDER}",
        "data.max_validation_rows=6",
        "module.reward.normalization_samples=2",
        "evaluation.max_new_tokens=4",
    )
    # One model measured twice: by pairs in Lightning's loop, and with each answer scored once.
    pairs = source_of("arguments").records("preferences", "validation")
    names = [
        name for name in {pair.domain for pair in pairs} if f"val/accuracy/domain/{name}" in metrics
    ]
    right = [
        metrics[f"val/accuracy/domain/{name}"] * metrics[f"val/num_pairs/domain/{name}"]
        for name in names
    ]
    assert sum(metrics[f"val/num_pairs/domain/{name}"] for name in names) == 6
    assert sum(right) / 6 == pytest.approx(metrics["val/accuracy"])


def test_sft_on_shell_commands(tmp_path):
    small = ("data.max_validation_rows=4", "evaluation.max_new_tokens=8")
    metrics = run(tmp_path, "shell_commands", f"artifacts.base={FOLDER}", *small)
    assert metrics["val/baseline_eos_fraction"] <= 0.5  # the chat model explains itself at length
    assert metrics["val/first_word_match"] >= metrics["val/exact_match"]
    assert 2.0 < metrics["val/loss"] < 6.0


def test_sft_and_ppo_on_word_problems(tmp_path):
    small = ("data.max_validation_rows=4", "evaluation.max_new_tokens=8")
    metrics = run(tmp_path, "gsm8k", f"artifacts.base={FOLDER}", *small)
    assert 0.5 < metrics["val/loss"] < 3.0
    metrics = run(
        tmp_path,
        "gsm8k",
        "module.sampling.max_new_tokens=8",
        "module.ppo.critic_warmup_iterations=0",
        experiment="ppo_smollm2_gsm8k",
    )
    assert metrics["val/score"] == metrics["val/solved"]
    assert metrics["val/kl_per_token"] != 0.0
