"""A tiny manual-optimization run that uses every generator, validates, and can be killed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, Sampler

from rlhf_lightning.callbacks.checkpointing import AtomicCheckpointIO, IterationCheckpoint
from rlhf_lightning.callbacks.exact_resume import RandomState
from rlhf_lightning.callbacks.run_tables import MetricsLog
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.resume import newest_complete_checkpoint

Death = tuple[str, int]


class KilledError(RuntimeError):
    """Raised where a kill would strike."""


class TinyModule(pl.LightningModule):
    stage = "ppo"
    algorithm = None

    def __init__(
        self, die_at: Death | None = None, losses: Mapping[int, float] | None = None
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy = nn.Linear(3, 1)
        self.die_at = die_at
        self.losses = losses or {}  # of the validation after an iteration
        self.validations: list[int] = []

    @classmethod
    def title_of(cls, algorithm: object) -> str:
        return cls.stage

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self._perhaps_die("train", batch_idx + 1)
        optimizer = self.optimizers()
        draws = random.random() + float(np.random.rand()) + torch.rand(()).item()
        # A number of optimizer steps that varies, as PPO's early stop makes it.
        for _ in range(1 + int(draws * 10) % 3):
            loss = ((self.policy(batch) - draws + random.gauss(0, 1)) ** 2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log_dict({"ppo/loss": loss.detach(), "ppo/draws": draws, "ppo/batch": batch.sum()})
        self._perhaps_die("after", batch_idx + 1)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        iteration = self.trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if not self.trainer.sanity_checking:
            self.validations.append(iteration)
            self._perhaps_die("validation", iteration)
        value = self.policy.weight.abs().sum() + torch.rand(()) + random.random()
        self.log("val/loss", self.losses.get(iteration, value), batch_size=len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def _perhaps_die(self, where: str, iteration: int) -> None:
        if self.die_at == (where, iteration):
            raise KilledError(f"{where} {iteration}")


class _FromStart(Sampler[int]):
    def __init__(self, n: int) -> None:
        self.n = n
        self.start = 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        yield from range(self.start, self.n)


class TinyData(pl.LightningDataModule):
    def __init__(self, num_iterations: int) -> None:
        super().__init__()
        self.sampler = _FromStart(num_iterations)
        self.rows = torch.randn(num_iterations, 3, generator=torch.Generator().manual_seed(5))

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(self.rows, batch_size=1, sampler=self.sampler, generator=generator)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.rows[:1], batch_size=1)  # draws from the global generator

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.trainer.fit_loop.epoch_loop.total_batch_idx + 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sampler.start = state_dict["done"]


def run(
    folder: Path,
    *,
    num_iterations: int = 8,
    validate_every: int = 2,
    save_every: int | None = 2,
    patience: int | None = None,
    die_at: Death | None = None,
    resume: bool = False,
    start: Path | None = None,
    losses: Mapping[int, float] | None = None,
    validate: bool = True,
    callbacks: list[pl.Callback] | None = None,
    logger: Any = False,
    **checkpoint: Any,
) -> tuple[pl.Trainer, TinyModule]:
    """Train the tiny module in `folder`; `checkpoint` are settings of IterationCheckpoint."""
    run_folder = RunFolder(folder)
    start = newest_complete_checkpoint(run_folder) if resume else start
    # A resumed process starts from other generators than the one that was killed.
    pl.seed_everything(1 if start is None else 99, verbose=False)
    module = TinyModule(die_at, losses)
    with torch.no_grad():
        module.policy.weight.fill_(0.5)
        module.policy.bias.fill_(0.1)
    settings: dict[str, Any] = {"every_n_iterations": save_every, "monitor": "val/loss"}
    settings |= checkpoint
    extra: list[pl.Callback] = list(callbacks or [])
    if patience is not None:
        extra.append(EarlyStopping("val/loss", patience=patience, mode="min"))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=logger,
        log_every_n_steps=1,
        val_check_interval=validate_every if validate else None,
        limit_val_batches=1.0 if validate else 0,
        num_sanity_val_steps=1,
        enable_progress_bar=any(isinstance(c, pl.callbacks.ProgressBar) for c in extra),
        enable_model_summary=False,
        plugins=[AtomicCheckpointIO()],
        callbacks=[
            IterationCheckpoint(run_folder.checkpoints, **settings),
            RandomState(),
            MetricsLog(run_folder),
            *extra,
        ],
    )
    trainer.fit(module, TinyData(num_iterations), ckpt_path=start)
    return trainer, module
