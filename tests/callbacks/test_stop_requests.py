"""Runs that are asked to save or to stop, by real signals and by minutes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from rlhf_lightning.callbacks.iterations import current_iteration
from rlhf_lightning.callbacks.run_record import RunRecord, RunStart
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.resume import checkpoint_iteration, newest_complete_checkpoint
from rlhf_lightning.runs.stopping import RunStoppedError
from rlhf_lightning.runs.summary import read_summary
from tests.callbacks.test_checkpointing import assert_same_run
from tests.callbacks.tiny_run import run


class Send(Callback):
    """Sends this process a signal at the start of an iteration, or in a validation."""

    def __init__(self, number: int, iteration: int, *, in_validation: bool = False) -> None:
        self.number = number
        self.iteration = iteration
        self.in_validation = in_validation

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if not self.in_validation and current_iteration(trainer) == self.iteration:
            os.kill(os.getpid(), self.number)

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        if self.in_validation and current_iteration(trainer) == self.iteration:
            os.kill(os.getpid(), self.number)


class Slow(Callback):
    """Each iteration takes that many seconds more."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.saved: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(self.seconds)

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        self.saved.append(current_iteration(trainer))


def last_saved(folder: Path) -> int | None:
    found = newest_complete_checkpoint(RunFolder(folder))
    return None if found is None else checkpoint_iteration(found)


@pytest.mark.parametrize(
    ("number", "iteration", "in_validation"),
    [
        (signal.SIGTERM, 3, False),
        (signal.SIGUSR1, 4, False),  # a validation follows
        (signal.SIGTERM, 4, True),
        (signal.SIGUSR2, 8, False),  # the last iteration
    ],
)
def test_a_signal_saves_and_stops_and_the_resumed_run_is_the_uninterrupted_one(
    tmp_path, number, iteration, in_validation
):
    settings: dict[str, Any] = {"num_iterations": 8, "validate_every": 4, "save_every": 100}
    whole = run(tmp_path / "whole", **settings)
    folder = tmp_path / "stopped"
    before = signal.getsignal(number)
    send = Send(number, iteration, in_validation=in_validation)
    name = signal.Signals(number).name
    with pytest.raises(RunStoppedError, match=f"^{name}: saved after iteration {iteration} of 8$"):
        run(folder, callbacks=[send], **settings)
    assert signal.getsignal(number) is before
    assert last_saved(folder) == iteration
    assert len(read_metrics(folder / "metrics.csv")) == iteration
    trainer, module = run(folder, resume=True, **settings)
    assert_same_run(trainer, module, folder, whole, tmp_path / "whole")


def test_a_run_of_the_library_that_is_told_to_stop_says_when_and_is_recorded_as_stopped(
    tmp_path, capfd
):
    folder = RunFolder(tmp_path)
    record = RunRecord(folder)
    told = [RunStart(record), record, Send(signal.SIGTERM, 3)]
    with pytest.raises(RunStoppedError):
        run(tmp_path, callbacks=told)
    said = "SIGTERM: the run stops, with a checkpoint, after this iteration\n"
    assert capfd.readouterr().err.count(said) == 1
    assert read_summary(folder).status == "stopped"
    assert "SIGTERM" in (read_summary(folder).cause or "")


def test_minutes_save_between_the_regular_checkpoints(tmp_path):
    slow = Slow(0.1)
    run(
        tmp_path,
        num_iterations=12,
        monitor=None,
        validate=False,
        save_every=None,
        every_minutes=0.35 / 60,
        callbacks=[slow],
    )
    assert slow.saved[-1] == 12
    gaps = [b - a for a, b in zip([0, *slow.saved], slow.saved, strict=False)]
    assert 2 <= len(gaps) <= 4, slow.saved
    assert all(gap <= 4 for gap in gaps), "0.35 s are at most four iterations of 0.1 s"
