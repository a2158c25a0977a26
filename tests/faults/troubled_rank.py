"""A callback that gives one rank alone a trouble, from its second batch on."""

from __future__ import annotations

import resource

from lightning.pytorch import Callback, LightningModule, Trainer


class Trouble(Callback):
    """Trouble of one rank.

    Args:
        rank: which one.
        what: "raises" an error, or has a "full disk" (a limit on the size of its files).
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
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
