"""`metrics.csv`: one row an iteration, written before the checkpoint of that iteration."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.callbacks.iterations import (
    current_iteration,
    fresh_metrics,
    validation_follows,
    writes,
)
from rlhf_lightning.runs.folder import MetricsAppender, RunFolder


class MetricsLog(Callback):
    """Write the metrics of every iteration, and of its validation, as one row.

    A run that resumes cuts the file back to the iteration of its checkpoint; one that starts
    from nothing empties it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._appender: MetricsAppender | None = None
        self._row: dict[str, float] = {}
        self._written = 0
        self._start = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember where the run starts; nothing is cut before there is something to write."""
        self._start = current_iteration(trainer)
        self._appender = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the row, unless a validation is about to add to it."""
        self._row = _measured(trainer)
        if not validation_follows(trainer):
            self._write(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the row together with what the validation logged."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._row |= _measured(trainer)
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if not writes(trainer):
            return
        iteration = current_iteration(trainer)
        if self._appender is None:
            self._appender = MetricsAppender(self.folder.metrics)
            self._appender.truncate(self._start)
        elif self._written == iteration:  # a validation was run after the row was written
            self._appender.truncate(iteration - 1)
        self._appender.append(iteration, self._row)
        self._written = iteration


def _measured(trainer: Trainer) -> dict[str, float]:
    # NaN says that something was not measured, as an empty cell does.
    return {name: value for name, value in fresh_metrics(trainer).items() if value == value}
