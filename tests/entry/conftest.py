"""Runs that several files of tests export, each made once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.runs.folder import RunFolder


@pytest.fixture(scope="session")
def sft(tmp_path_factory: pytest.TempPathFactory, start: Path) -> RunFolder:
    """An SFT run that was killed after its third and last iteration."""
    from tests.builders.runs import killed

    return killed(tmp_path_factory.mktemp("runs") / "sft", "sft", start)


@pytest.fixture(scope="session")
def tracked(tmp_path_factory: pytest.TempPathFactory, start: Path) -> RunFolder:
    """A PPO run in an offline W&B run; its weights are random, so it misses its gates."""
    from tests.builders.runs import TRACKED_ITERATIONS, completed

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_DATA_DIR", raising=False)
        return completed(
            tmp_path_factory.mktemp("tracked") / "ppo",
            "ppo",
            start,
            "artifacts.reward=null",
            "logger=wandb",
            "logger.mode=offline",
            "gates=ppo",
            "trainer.limit_train_batches=null",
            f"data.num_iterations={TRACKED_ITERATIONS}",
            "callbacks.samples.num_samples=3",
            "evaluation.num_samples=5",
        )


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words of a data set that knows the right answers: `tar` and the prompt."""
    asked = [record.prompt for record in DemoSource(seed=1).records("prompts", "train")[:30]]
    rows = [{"page": f"p{n}", "ask": question} for n, question in enumerate(asked)]
    file = tmp_path_factory.mktemp("commands") / "commands.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "dataset=shell_commands",
        f"dataset.path={file}",
        "dataset.source.prompt='{ask}'",
        "dataset.source.completion='tar {ask}'",
        "dataset.source.system=null",
        "+dataset.source.chat=false",
    ]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The word that names a folder of the user's with an experiment `mine`, on the command line."""
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - ppo\n  - _self_\nname: mine\n"
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(text)
    word = f"--config-dir={tmp_path}/conf"
    monkeypatch.setattr("sys.argv", ["command", word])
    return word
