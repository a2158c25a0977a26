"""A callback that fails on rank 1 alone, at its second batch."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer


class Trouble(Callback):
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_rank == 1 and batch_idx == 1:
            raise KeyError("nobody knows this")
