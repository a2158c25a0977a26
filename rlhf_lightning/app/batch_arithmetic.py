"""How a batch is divided, and how many optimizer steps come of the data.

Light on purpose: no torch, so that a mistake is answered at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlhf_lightning.app.stages.spec import StageSpec, find_stage

FEW_STEPS = 30  # Adam's moments and a warm-up of 5 % mean little in fewer
SMALLEST_BATCH = 8  # of the batches that are suggested


def batch_unit(container: Mapping[str, Any]) -> int:
    """Return what `data.batch_size` must be a multiple of: devices times minibatches."""
    trainer, stage = container["trainer"], find_stage(container["stage"])
    minibatches = 1
    if stage.minibatches is not None:
        minibatches = int(container["module"][stage.settings][stage.minibatches.count])
    return int(trainer["devices"]) * int(trainer["num_nodes"]) * minibatches


def minibatches_key(stage: StageSpec) -> str | None:
    """Return the setting that divides a batch into minibatches; None where nothing does."""
    minibatches = stage.minibatches
    return None if minibatches is None else f"module.{stage.settings}.{minibatches.count}"


def check_batch_divides(container: Mapping[str, Any]) -> None:
    """Refuse a global batch that cannot be dealt to devices and minibatches.

    Args:
        container: the configuration as plain dicts; its types have been checked.

    Raises:
        ValueError: with both numbers and batch sizes that work.
    """
    if "batch_size" not in container["data"]:
        raise ValueError("data.batch_size is missing: set it, such as data.batch_size=32")
    rows = container["data"]["batch_size"]
    if not isinstance(rows, int) or isinstance(rows, bool):
        raise ValueError(f"data.batch_size={rows!r} must be a whole number, at least 1")
    if rows < 1:
        raise ValueError(f"data.batch_size={rows} must be positive: a whole number, at least 1")
    unit = batch_unit(container)
    if rows % unit == 0:
        return
    key = minibatches_key(find_stage(container["stage"]))
    ranks = int(container["trainer"]["devices"]) * int(container["trainer"]["num_nodes"])
    if ranks == 1:
        divisors = [n for n in range(1, 17) if rows % n == 0]
        raise ValueError(
            f"{key}={unit} must divide data.batch_size={rows}: "
            f"use one of {divisors}, or data.batch_size={_multiples(rows, unit)}"
        )
    nodes = int(container["trainer"]["num_nodes"])
    devices = f"{ranks} devices (trainer.devices={ranks // nodes}, trainer.num_nodes={nodes})"
    minibatches = unit // ranks
    parts = devices if key is None else f"{devices} x {key}={minibatches} = {unit}"
    raise ValueError(
        f"data.batch_size={rows} is global and must be a multiple of {parts}: use "
        f"data.batch_size={_multiples(rows, unit)}"
    )


def _multiples(rows: int, unit: int) -> str:
    below, above = rows // unit * unit, (rows // unit + 1) * unit
    return f"{below} or {above}" if below else str(above)


def more_steps(
    num_rows: int, batch_size: int, num_epochs: float, *, unit: int = 1
) -> tuple[int, float, int]:
    """Return a batch size and passes over the data that make `FEW_STEPS` steps, and the steps.

    The batch is halved first, down to `SMALLEST_BATCH` rows; then passes are added.

    Args:
        num_rows: training rows.
        batch_size: as it is.
        num_epochs: as they are.
        unit: the batch must stay a multiple of it.
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
