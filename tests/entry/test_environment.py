"""The environment in which people start a command: ranks, Slurm's shells, -OO, and `~`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.plugins.environments import SLURMEnvironment

from rlhf_lightning.app.command_line import check_command_line
from rlhf_lightning.app.start import start
from rlhf_lightning.app.train import main
from rlhf_lightning.distributed.launch import RANK_VARIABLES, adopt_rank
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.replaced import replacing_folder
from tests.builders.command_lines import environment


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANK_VARIABLES, "RLHF_AGREED_STARTED_AT", "RLHF_AGREED_LAUNCH_TIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())


MET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
LONELY = [
    {"RANK": "1", "WORLD_SIZE": "2"},
    {"RANK": "0", "WORLD_SIZE": "2"},
    {"RANK": "1"},
    {"WORLD_SIZE": "2"},
    {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
    {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
    {"RANK": "2", "WORLD_SIZE": "2", **MET},
    {"RANK": "-1", "WORLD_SIZE": "2", **MET},
    {"RANK": "one", "WORLD_SIZE": "2", **MET},
]


@pytest.mark.parametrize("variables", LONELY, ids=str)
def test_a_rank_that_cannot_meet_the_others_does_not_train_alone(variables, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train", "+experiment=base"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert all(f"{name}={value}" in line for name, value in variables.items() if name in line)


@pytest.mark.parametrize(
    "variables",
    [{}, {"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}],
    ids=str,
)
def test_one_process_and_the_children_of_lightning_go_on(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    adopt_rank()


def test_a_shell_inside_salloc_is_one_process(monkeypatch):
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NAME": "salloc"}
    for name, value in (job | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).items():
        monkeypatch.setenv(name, value)
    adopt_rank()
    assert not SLURMEnvironment.detect()
    assert "RANK" not in os.environ


def test_a_python_without_docstrings_is_refused_in_one_line(tmp_path):
    words = ["-OO", "-m", "rlhf_lightning.train", "+experiment=base"]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: python -OO")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["train", "evaluate", "report", "export"])
def test_a_working_folder_that_was_removed_is_one_line(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "argv", [command])
    with pytest.raises(SystemExit) as ended:
        start(command)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the working folder was removed")


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
