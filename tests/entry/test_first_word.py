"""The first answer of a command: what needs no torch costs at most 3 s of processor time."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.builders.command_lines import environment

LIMIT_SECONDS = 3.0  # of user and system time; importing torch and Lightning alone costs more


@pytest.mark.parametrize(
    ("command", "words", "told"),
    [
        ("train", "--help", "rlhf_lightning.train"),
        ("train", "+experiment=ppo module.ppo.kl_coeff=1", "did you mean module.ppo.kl_coef"),
        ("train", "+experiment=ppo module.ppo.kl_coef=-1", "module.ppo.kl_coef=-1 must be >= 0"),
        ("train", "+experiment=ppo trainer.devices=0", "trainer.devices=0 must be >= 1"),
        ("chat", "./missing", "run=./missing is no run and no model"),
    ],
)
def test_help_and_mistakes_that_need_no_torch_are_answered_at_once(command, words, told, tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", f"rlhf_lightning.{command}", *words.split()],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert told in done.stdout + done.stderr
    assert done.returncode == (0 if words == "--help" else 2)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent <= LIMIT_SECONDS
