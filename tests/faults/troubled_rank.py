"""A callback that gives one rank alone a trouble, from its second batch on."""

from __future__ import annotations

import os
import resource
import time

from lightning.pytorch import Callback, LightningModule, Trainer

HANGS = "this rank hangs now"


class Trouble(Callback):
    """Trouble of one rank.

    Args:
        rank: which one.
        what: "raises" an error, "hangs" outside of every exchange between ranks, or has a "full
            disk" (a limit on the size of its files).
    """

    def __init__(self, rank: int, what: str) -> None:
        self.rank = rank
        self.what = what

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_rank != self.rank or batch_idx != 1:
            return
        if self.what == "raises":
            raise KeyError("nobody knows this")
        if self.what == "hangs":
            os.write(1, f"{HANGS}\n".encode())
            time.sleep(600)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
