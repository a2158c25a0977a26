"""The environment in which people start a command: Slurm's shells, output, and `~`."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.plugins.environments import SLURMEnvironment

from rlhf_lightning.app.command_line import check_command_line
from rlhf_lightning.distributed.launch import RANK_VARIABLES, adopt_rank
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.publish import replacing_folder
from tests.builders.command_lines import environment, small_sft, train


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


@pytest.mark.parametrize("extra", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["as it is", "unbuffered"])
def test_lines_are_in_order_with_errors_and_child_processes(tmp_path, extra):
    program = (
        "import subprocess, sys\n"
        "from rlhf_lightning.app.start import start\n"
        "sys.argv = ['train', '--version']\n"
        "start('train')\n"
        "print('\u2581 second', file=sys.stderr)\n"
        "print('\u2581 third')\n"
        "subprocess.run([sys.executable, '-c', 'print(\"fourth\")'], check=True)\n"
        "print('fifth')"
    )
    with (tmp_path / "out").open("wb") as out:
        own = environment() | extra | {"PYTHONIOENCODING": "ascii"}
        subprocess.run([sys.executable, "-c", program], env=own, stdout=out, stderr=out, check=True)
    lines = (tmp_path / "out").read_text().splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["second", "third", "fourth", "fifth"]
    assert lines[0].startswith("rlhf_lightning ")


@pytest.mark.thorough
def test_commands_silence_the_warnings_of_transformers_after_it_was_imported() -> None:
    script = (
        "from rlhf_lightning.app.train import main\n"
        "from rlhf_lightning.models.quiet import quieten\n"
        "from transformers.utils.logging import get_verbosity\n"
        "quieten()\nprint(get_verbosity())"
    )
    unset = {k: v for k, v in os.environ.items() if k != "TRANSFORMERS_VERBOSITY"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=unset, capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) == logging.ERROR


@pytest.mark.thorough
def test_a_run_with_adapters_does_not_tell_that_their_frozen_base_is_in_eval_mode(start, tmp_path):
    done = train(tmp_path, *small_sft(start, "lora=lora"))
    assert done.returncode == 0, done.stderr
    assert "eval mode" not in done.stdout + done.stderr
