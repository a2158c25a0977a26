from __future__ import annotations

import os
import signal
from datetime import datetime

import pytest

from rlhf_lightning.runs.stopping import (
    RunStoppedError,
    deadline,
    stopping_on_signals,
)

START = datetime(2026, 11, 21, 22, 0).timestamp()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3h50m", 13800),
        ("1d2h30m", 95400),
        ("2026-11-22T06:30", 8.5 * 3600),
    ],
)
def test_a_deadline_is_a_time_after_the_start_or_a_moment(text, seconds):
    assert deadline(text, started=START) == START + seconds


def test_slurm_says_when_the_job_ends(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "99")
    assert deadline("slurm", started=START) == 99
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    with pytest.raises(ValueError, match="SLURM_JOB_END_TIME"):
        deadline("slurm", started=START)


@pytest.mark.parametrize(
    ("text", "told"), [("soon", "3h50m"), ("50", "3h50m"), ("2020-01-01T00:00", "before the start")]
)
def test_what_is_no_time_of_the_run_is_refused(text, told):
    with pytest.raises(ValueError, match=told):
        deadline(text, started=START)


def test_outside_of_training_a_signal_stops_at_once():
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(RunStoppedError, match="SIGUSR1"), stopping_on_signals():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is before
