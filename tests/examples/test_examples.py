"""The examples run as a user runs them, each on a tiny model."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_lightning import (
    PPOHparams,
    PromptDataModule,
    SamplingHparams,
    SFTModule,
    trainer_arguments,
)
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from tests.builders.processes import run_python
from tests.builders.record_files import write_material

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_material(tmp_path_factory.mktemp("material"))


def run(example: str, *arguments: object, iterations: Sequence[str] = ("--iterations", "2")) -> str:
    script = ROOT / "examples" / f"{example}.py"
    two = ["2"] if example == "online_dpo" else iterations
    done = run_python(script, *arguments, *two, folder=ROOT, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def completed(folder: Path, stage: str) -> dict[str, float]:
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["stage"], summary["status"]) == (stage, "completed")
    assert len((folder / "metrics.csv").read_text().splitlines()) == 3
    assert (folder / "report.html").stat().st_size > 1000
    assert (folder / "checkpoints" / "last.ckpt").exists()
    return summary["metrics"]


def test_examples_are_short_and_nine():
    assert len(EXAMPLES) == 9
    for example in EXAMPLES:
        assert len(example.read_text().splitlines()) <= 40, example.name


@pytest.mark.parametrize(
    ("example", "records", "stage"),
    [
        ("sft", "demonstrations", "sft"),
        pytest.param("ppo_custom_reward", "prompts", "ppo", marks=pytest.mark.thorough),
        pytest.param("ppo_new_objective", "prompts", "ppo", marks=pytest.mark.thorough),
        pytest.param("grpo", "prompts", "grpo", marks=pytest.mark.thorough),
        pytest.param("online_dpo", "prompts", "grpo", marks=pytest.mark.thorough),
    ],
)
def test_an_example_trains_to_its_end(example, records, stage, material, tmp_path):
    run(example, material["policy"], material[records], tmp_path / "run")
    completed(tmp_path / "run", stage)
    header = (tmp_path / "run/metrics.csv").read_text().splitlines()[0].split(",")
    assert any("value" in name for name in header) == (stage == "ppo")
    if stage == "grpo":
        assert {"grpo/policy_loss", "rollout/informative_groups"} <= set(header)
    if stage == "sft":
        AutoModelForCausalLM.from_pretrained(tmp_path / "run/export")


def test_a_reward_model_and_ppo_against_it(material, tmp_path):
    run("reward_model", material["policy"], material["pairs"], tmp_path / "reward")
    completed(tmp_path / "reward", "reward")
    reward = tmp_path / "reward/export"
    AutoModelForSequenceClassification.from_pretrained(reward)
    said = run("ppo", material["policy"], reward, material["prompts"], tmp_path / "ppo")
    completed(tmp_path / "ppo", "ppo")
    assert "win rate" in said
    assert (tmp_path / "ppo/samples.jsonl").exists()


def test_the_kl_coefficient_follows_its_schedule(material, tmp_path):
    run("kl_schedule", material["policy"], material["prompts"], tmp_path / "run")
    completed(tmp_path / "run", "ppo")
    rows = read_metrics(RunFolder(tmp_path / "run").metrics)
    assert [row["ppo/kl_coef"] for row in rows] == pytest.approx([0.2, 0.02])


def test_lightnings_command_line_trains_resumes_and_writes_its_settings(material, tmp_path):
    words = [f"--model.source={material['policy']}", f"--data.path={material['demonstrations']}"]
    words += [f"--trainer.folder={tmp_path / 'run'}", "--trainer.iterations"]
    shown = run("lightning_cli", "fit", *words, "2", "--print_config", iterations=())
    (tmp_path / "run.yaml").write_text(shown)
    run("lightning_cli", "fit", "--config", tmp_path / "run.yaml", iterations=())
    completed(tmp_path / "run", "sft")
    SFTModule.load_from_checkpoint(tmp_path / "run/checkpoints/last.ckpt")
    more = ["3", "--ckpt_path=last", "--weights_only=true"]
    run("lightning_cli", "fit", *words, *more, iterations=())
    assert len((tmp_path / "run/metrics.csv").read_text().splitlines()) == 4


class Keep(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.rollout = outputs["rollout"]
        self.loss = float(trainer.callback_metrics["ppo/policy_loss"])


def test_the_new_objective_reads_the_policy_at_the_temperature_of_its_samples(material, tmp_path):
    names = runpy.run_path(str(ROOT / "examples/ppo_new_objective.py"))
    module = names["UnclippedPPOModule"].from_pretrained(
        material["policy"],
        lambda prompts, completions, **_: [float(len(text)) for text in completions],
        ppo=PPOHparams(num_ppo_epochs=1, num_minibatches=1),
        sampling=SamplingHparams(max_new_tokens=4, temperature=0.7),
    )
    data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=8)
    kept = Keep()
    given = {"max_iterations": 1, "accelerator": "cpu", "enable_progress_bar": False}
    L.Trainer(**trainer_arguments(tmp_path / "run", callbacks=kept, **given)).fit(module, data)
    rollout = kept.rollout
    sampled = (rollout.logprobs * rollout.advantages).sum() / rollout.response_mask.sum()
    assert kept.loss == pytest.approx(-float(sampled), rel=1e-4)
