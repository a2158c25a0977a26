from __future__ import annotations

import os
import signal
from datetime import datetime

import pytest

from rlhf_lightning.runs.stopping import (
    RunStoppedError,
    SaveClock,
    deadline,
    stopping_on_signals,
)

START = datetime(2026, 11, 21, 22, 0).timestamp()


class Clock:
    def __init__(self) -> None:
        self.time = START

    def __call__(self) -> float:
        return self.time


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


def test_a_deadline_leaves_room_for_the_longest_iteration_and_two_saves():
    now = Clock()
    clock = SaveClock(deadline=START + 1000, now=now)
    clock.start()
    now.time += 100
    clock.end_iteration()
    assert clock.save_is_due(), "the first save shows how long one takes"
    with clock.saving():
        now.time += 50
    assert not clock.save_is_due()
    now.time += 40
    clock.end_iteration()  # a short one does not count
    now.time = START + 1000 - 125 - 100 - 1
    assert not clock.must_stop()
    now.time += 1
    assert clock.must_stop()


def test_outside_of_training_a_signal_stops_at_once():
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(RunStoppedError, match="SIGUSR1"), stopping_on_signals():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is before
