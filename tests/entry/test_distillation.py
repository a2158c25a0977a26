"""`+experiment=distillation`: a command, its program, adapters, gates, plan and evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_lightning.app import train
from rlhf_lightning.app.as_python import as_python
from rlhf_lightning.app.config.saved import write_settings
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.summary import read_summary
from rlhf_lightning.text.tokenizers import load_tokenizer
from tests.builders.command_lines import SMALL, settings_of
from tests.builders.library_runs import rows

WORDS = [
    "+experiment=distillation",
    *SMALL,
    "module.sampling.max_new_tokens=6",
    "data.batch_size=8",
]


@pytest.fixture(scope="module")
def teacher(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another policy of the built-in world's tokens, with other weights."""
    folder = tmp_path_factory.mktemp("teacher") / "policy"
    policy = load_policy(start)
    for parameter in policy.parameters():
        parameter.data.mul_(1.5)
    policy.model.save_pretrained(folder)
    load_tokenizer(start).save_pretrained(folder)
    return folder


def settings(start: Path, teacher: Path | str, *more: str) -> Any:
    return settings_of(*WORDS, f"artifacts.sft={start}", f"artifacts.teacher={teacher}", *more)


def trained(start: Path, teacher: Path, folder: Path, *more: str) -> RunFolder:
    made, found = RunFolder(folder).create(), settings(start, teacher, *more)
    made.config.parent.mkdir(exist_ok=True)
    write_settings(made.config, found)  # as Hydra does
    train.run(found, made, [])
    return made


@pytest.fixture(scope="module")
def command(start: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("command") / "run"
    return trained(start, teacher, folder, "gates=distillation")


def test_a_command_trains_it_and_its_program_does_the_same_to_the_bit(
    start, teacher, command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    text = as_python(settings(start, teacher), WORDS)
    assert f'teacher="{teacher}"' in text
    assert "NoReward()" in text
    exec(compile(text, "program", "exec"), {})
    (found,) = tmp_path.glob("outputs/*/program/summary.json")
    files = [f.export / "model.safetensors" for f in (command, RunFolder(found.parent))]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert rows(command.path) == rows(found.parent)


def test_the_headline_is_the_distance_to_the_teacher_and_no_score_is_told(command):
    summary = read_summary(command)
    assert (summary.stage, summary.status) == ("distillation", "completed")
    metrics = summary.metrics
    assert summary.about["teacher"] == ".../policy"
    assert {"val/teacher_kl_share", "val/gold_win_rate"} <= set(metrics)
    assert not [name for name in metrics if "score" in name]
    assert {gate.name for gate in summary.gates} >= {"teacher_kl_share", "gold_win_rate"}
    assert "did not vary" not in command.report.read_text()
    sample = json.loads(command.samples.read_text().splitlines()[0])
    assert sample["score"] is None
    assert "rollout/score" not in read_metrics(command.metrics)[0]


@pytest.mark.thorough
def test_adapters_the_sampled_form_a_reward_and_the_doctor_work_with_it(start, teacher, tmp_path):
    more = ("lora=lora", "doctor=act", "module.distillation.divergence=sampled", "gates=none")
    made = trained(start, teacher, tmp_path / "lora", *more)
    assert (made.export / "adapter").is_dir()
    function = tmp_path / "reward.py"
    function.write_text("def length(completions):\n    return [len(c) / 9 for c in completions]\n")
    more = ("scorer=function", f"scorer.function={function}:length", "gates=none")
    rewarded = trained(start, teacher, tmp_path / "reward", *more)
    summary = read_summary(rewarded)
    assert "val/score_win_rate" in summary.metrics
    assert read_metrics(rewarded.metrics)[0]["rollout/score_std"] > 0


def test_a_run_continues_from_a_checkpoint_to_the_same_bits(start, teacher, command, tmp_path):
    (checkpoint,) = command.checkpoints.glob("*2.ckpt")
    resumed = trained(start, teacher, tmp_path / "resumed", f"ckpt_path='{checkpoint}'")
    files = [folder.export / "model.safetensors" for folder in (command, resumed)]
    assert files[0].read_bytes() == files[1].read_bytes()
