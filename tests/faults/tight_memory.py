"""A callback that takes the memory away, so that a real allocation fails in the next step."""

from __future__ import annotations

import resource
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

SPARE = 2**20


class TightMemory(Callback):
    """From the second batch on the process may grow by `SPARE` bytes of address space."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + SPARE
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # What follows the failed allocation is not the subject: C++ at exit crashes without memory.
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
