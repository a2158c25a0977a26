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


def test_slurm_says_when_the_job_ends():
    assert deadline("slurm", started=START, environment={"SLURM_JOB_END_TIME": "99"}) == 99
    with pytest.raises(ValueError, match="SLURM_JOB_END_TIME"):
        deadline("slurm", started=START, environment={})


@pytest.mark.parametrize("text", ["soon", "50"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match="3h50m"):
        deadline(text, started=START)


def test_outside_of_training_a_signal_stops_at_once():
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(RunStoppedError, match="SIGUSR1"), stopping_on_signals():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is before
