"""Runs that several files of tests export, each made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_lightning.runs.folder import RunFolder


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.entry.small_runs import make_start

    return make_start(tmp_path_factory.mktemp("models") / "start")


@pytest.fixture(scope="session")
def sft(tmp_path_factory: pytest.TempPathFactory, start: Path) -> RunFolder:
    """An SFT run that was killed after its third and last iteration."""
    from tests.entry.small_runs import killed

    return killed(tmp_path_factory.mktemp("runs") / "sft", "sft", start)
