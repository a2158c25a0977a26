"""Resident memory of a training process, an iteration each, and its growth."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.callbacks.iterations import current_iteration


class MemoryLog(Callback):
    """Append a line `process iteration resident_bytes` after every iteration.

    Args:
        file: to append to.
    """

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *arguments: object
    ) -> None:
        """Append the line of an iteration."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        line = f"{os.getpid()} {current_iteration(trainer)} {pages * resource.getpagesize()}\n"
        with self.file.open("a") as file:
            file.write(line)


def read_memory(file: Path) -> list[tuple[int, int, int]]:
    """Return process, iteration and resident bytes of each finished iteration, in order."""
    if not file.exists():
        return []
    whole = file.read_text().rpartition("\n")[0]  # a kill may have cut the last line
    rows = [line.split() for line in whole.splitlines()]
    return [(int(pid), int(iteration), int(size)) for pid, iteration, size in rows]


def growth(rows: list[tuple[int, int, int]], *, warm_up: int, window: int) -> float:
    """Return the share by which the memory of one process has grown since its warm-up.

    Compared are the medians of the first and of the last `window` iterations after it.
    """
    sizes = [size for _, iteration, size in rows if iteration > warm_up]
    assert len(sizes) >= 2 * window, f"{len(sizes)} iterations are too few"
    first, last = (sorted(part)[window // 2] for part in (sizes[:window], sizes[-window:]))
    return last / first - 1
