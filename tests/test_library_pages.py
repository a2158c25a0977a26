"""The page of a run from Python: what `compare` measured, and a reward model's held-out pairs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from rlhf_lightning import (
    PPOHparams,
    PPOModule,
    PreferenceDataModule,
    PromptDataModule,
    RewardHparams,
    RewardModule,
    SamplingHparams,
    compare,
    trainer_arguments,
)
from rlhf_lightning.runs.folder import RunFolder, read_samples
from rlhf_lightning.runs.summary import read_summary
from rlhf_lightning.runs.verdict import verdict
from tests.builders.record_files import row_text, write, write_material


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("material")
    made = write_material(folder)
    made["other_policy"] = shutil.copytree(made["policy"], folder / "other_policy")
    rows = [{"prompt": row_text(i, 3), "chosen": row_text(i, 5)} for i in range(40)]
    made["pairs"] = write(folder / "p.jsonl", [row | {"rejected": "w3 w4"} for row in rows])
    return made


def length(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def shortness(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    given = {"max_iterations": 3, "accelerator": "cpu", "enable_progress_bar": False}
    return trainer_arguments(folder, **given | changes)


def held_out(folder: RunFolder) -> list[dict[str, Any]]:
    return [line for line in read_samples(folder.distributions) if "held_out" in line]


@pytest.fixture(scope="module")
def trained(material, tmp_path_factory):
    folder = RunFolder(tmp_path_factory.mktemp("ppo") / "run")
    module = PPOModule.from_pretrained(
        material["policy"],
        length,
        ppo=PPOHparams(num_minibatches=2, num_ppo_epochs=1),
        sampling=SamplingHparams(max_new_tokens=5),
    )
    data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=4)
    L.Trainer(**arguments(folder.path)).fit(module, data)
    return module, data, folder


def test_compare_adds_its_figures_responses_and_histograms_to_the_page_of_the_run(
    material, trained
):
    module, data, folder = trained
    assert held_out(folder) == []
    found = compare(module, material["policy"], data, reward=length)
    summary, (values,) = read_summary(folder), held_out(folder)
    assert summary.metrics["val/score_win_rate"] == found.win_rate
    assert len(values["length"]) == len(values["baseline_length"]) == found.num_prompts
    page = folder.report.read_text()
    assert "before, mean" in page
    assert f"{found.num_prompts} held-out prompts" in page
    enough = replace(summary, metrics={**summary.metrics, "val/num_prompts": 30.0})
    assert "the reward it was trained on" in verdict(enough).sentence


def test_the_last_comparison_is_the_one_on_the_page_and_says_by_what_and_against_what(
    material, trained
):
    module, data, folder = trained
    compare(module, material["policy"], data, reward=length)
    found = compare(module, material["other_policy"], data, reward=shortness)
    summary = read_summary(folder)
    assert summary.about["compared by"] == "shortness"
    assert summary.about["reward"] == "length"
    assert summary.about["baseline"].endswith(material["other_policy"].name)
    assert "trained on" not in verdict(summary).sentence
    assert len(held_out(folder)) == 1
    domains = {name for name in summary.metrics if "/domain/" in name}
    rows = [{"prompt": f"w1 w{i}"} for i in range(2, 12)]
    compare(module, material["policy"], rows, reward=length)
    assert not domains & set(read_summary(folder).metrics), "of the comparison before"
    compare(module, material["other_policy"], data, reward=shortness)
    sides = [row for row in read_samples(folder.samples) if "baseline_response" in row]
    assert len(sides) == found.num_prompts


class DuringTraining(L.Callback):
    def __init__(self, policy: Path, data: Any) -> None:
        self.policy, self.data = policy, data

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        compare(pl_module, self.policy, self.data, reward=length, num_prompts=2)


def test_a_comparison_during_training_is_none_of_the_end(material, tmp_path):
    module = PPOModule.from_pretrained(
        material["policy"], length, sampling=SamplingHparams(max_new_tokens=5)
    )
    data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=4)
    folder = RunFolder(tmp_path / "run")
    own = DuringTraining(material["policy"], data)
    L.Trainer(**arguments(folder.path, callbacks=[own])).fit(module, data)
    assert "val/score_win_rate" not in read_summary(folder).metrics
    assert held_out(folder) == []


def reward(
    material: dict[str, Path], folder: Path, hparams: RewardHparams | None = None, **changes: Any
) -> RunFolder:
    module = RewardModule.from_pretrained(material["policy"], reward=hparams)
    data = PreferenceDataModule(material["pairs"], module.tokenizer, batch_size=4)
    L.Trainer(**arguments(folder, **changes)).fit(module, data)
    return RunFolder(folder)


def test_a_reward_model_from_python_shows_its_held_out_pairs(material, tmp_path):
    folder = reward(material, tmp_path / "run")
    metrics, (values,) = read_summary(folder).metrics, held_out(folder)
    right = sum(margin > 0 for margin in values["margin"]) / len(values["margin"])
    assert right == pytest.approx(metrics["val/accuracy"])
    assert {"reliability", "wrong"} <= values.keys()
    assert "val/accuracy_chosen_longer" in metrics or "val/accuracy_chosen_shorter" in metrics
    assert f"Margins of {len(values['margin'])} pairs" in folder.report.read_text()
