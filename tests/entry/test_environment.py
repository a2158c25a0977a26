"""The environment in which people start a command: Slurm's shells, output, and `~`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from lightning.pytorch.plugins.environments import SLURMEnvironment

from rlhf_lightning.app.command_line import check_command_line
from rlhf_lightning.distributed.launch import RANK_VARIABLES, adopt_rank
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import replacing_folder


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANK_VARIABLES, "RLHF_AGREED_LAUNCH_TIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_a_shell_inside_salloc_is_one_process(monkeypatch):
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NAME": "salloc"}
    for name, value in (job | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).items():
        monkeypatch.setenv(name, value)
    adopt_rank()
    assert not SLURMEnvironment.detect()
    assert "RANK" not in os.environ


def test_the_home_folder_is_read_behind_a_key_and_from_python(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["+experiment=sft", "artifacts.base=~/m", "paths.outputs=~", "gates=none"]
    monkeypatch.setattr(sys, "argv", ["train", *words])
    settings = check_command_line("train")
    assert settings.artifacts.base == f"{tmp_path}/m"
    assert settings.paths.outputs == str(tmp_path)
    assert RunFolder(Path("~/run")).create().path == tmp_path / "run"
    with replacing_folder("~/made") as staging:
        staging.mkdir()
    assert (tmp_path / "made").is_dir()
