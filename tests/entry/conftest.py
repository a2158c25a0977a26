"""Runs that several files of tests export, each made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_lightning.runs.folder import RunFolder


@pytest.fixture(scope="session")
def sft(tmp_path_factory: pytest.TempPathFactory, start: Path) -> RunFolder:
    """An SFT run that was killed after its third and last iteration."""
    from tests.builders.runs import killed

    return killed(tmp_path_factory.mktemp("runs") / "sft", "sft", start)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The word that names a folder of the user's with an experiment `mine`, on the command line."""
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - ppo\n  - _self_\nname: mine\n"
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(text)
    word = f"--config-dir={tmp_path}/conf"
    monkeypatch.setattr("sys.argv", ["command", word])
    return word
