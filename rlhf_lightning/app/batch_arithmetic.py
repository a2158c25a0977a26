"""Batch arithmetic: minibatches, devices, optimizer steps."""

from __future__ import annotations

import math

from rlhf_lightning.app.stages.spec import Stage

FEW_STEPS = 30  # Adam's moments and a warm-up of 5 % mean little in fewer
SMALLEST_BATCH = 8  # of the batches that are suggested


def minibatches_key(stage: Stage) -> str | None:
    """Return the setting that divides a batch into minibatches; None where nothing does."""
    return f"module.{stage.settings}.num_minibatches" if stage.rolls_out else None


def more_steps(
    num_rows: int, batch_size: int, num_epochs: float, *, unit: int = 1
) -> tuple[int, float, int]:
    """Return a batch size and passes over the data that make `FEW_STEPS` steps, and the steps.

    The batch is halved first, down to `SMALLEST_BATCH` rows; then passes are added.

    Args:
        num_rows: number of training rows.
        batch_size: current batch size.
        num_epochs: current passes over the data.
        unit: number of which the batch size must stay a multiple.
    """
    size = batch_size
    while _steps(num_rows, size, num_epochs) < FEW_STEPS:
        half = size // 2
        if half < SMALLEST_BATCH or half % unit:
            break
        size = half
    epochs = num_epochs
    if _steps(num_rows, size, epochs) < FEW_STEPS:
        epochs = math.ceil(FEW_STEPS * size / num_rows)
    return size, epochs, _steps(num_rows, size, epochs)


def _steps(num_rows: int, batch_size: int, num_epochs: float) -> int:
    return math.ceil(num_epochs * num_rows / batch_size)
