"""Optimizer steps of this project's SFT and reward modules, in a real Trainer."""

from __future__ import annotations

import benchmarks.as_trained  # noqa: F401  (before torch loads)

# isort: split

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.configured import PRECISIONS, bare_trainer, training_settings
from benchmarks.ragged import Ragged, answers, pairs
from benchmarks.shapes import PAD
from benchmarks.worker import StepCounter, Stopwatch, Task, worker_main
from rlhf_lightning.app.build import make_module
from rlhf_lightning.batches import PreferenceBatch, SFTBatch


class Watch(L.Callback):
    """Notes the time of every optimizer step."""

    def __init__(self, device: str) -> None:
        self.watch, self.steps = Stopwatch(device), StepCounter()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self.steps.watch(trainer.optimizers[0])
        self.watch.mark()

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Take the lap."""
        self.watch.mark()


def run(task: Task) -> dict[str, Any]:
    """Run the task's steps; return the measured ones, in order."""
    ragged = Ragged(**task["ragged"])
    total = task["warmup"] + task["iterations"]
    make = {"sft": sft_batch, "reward": pair_batch}[task["stage"]]
    batches: Any = [make(ragged, task["vocabulary"], step) for step in range(total)]
    watch = Watch(task["device"])
    trainer = bare_trainer(task, watch)
    trainer.fit(training_module(task, ragged), DataLoader(batches, batch_size=None))
    return {
        "iterations": watch.watch.laps()[task["warmup"] :],
        "optimizer_steps": watch.steps.count,
    }


def training_module(task: Task, ragged: Ragged) -> L.LightningModule:
    """Return the module that `+experiment=sft` or `+experiment=reward` makes."""
    stage, folder = task["stage"], task["folder"]
    start = {"sft": "artifacts.base={}/policy", "reward": "artifacts.sft={}/policy"}[stage]
    settings = training_settings(
        stage,
        f"trainer.precision={PRECISIONS[task['precision']]}",
        start.format(folder),
        f"module.{stage}.micro_batch_size={ragged.micro_batch_size}",
        f"module.{stage}.learning_rate=1.0e-6",
    )
    module: L.LightningModule = make_module(settings)
    return module


def sft_batch(ragged: Ragged, vocabulary: int, step: int) -> SFTBatch:
    """Return the rows of a step; the last three quarters of each are learnt."""
    rows = answers(ragged, vocabulary, step)
    ids, mask = padded([row for row, _ in rows])
    prompt = torch.tensor([length for _, length in rows])
    columns = torch.arange(ids.shape[1])
    return SFTBatch(
        input_ids=ids,
        attention_mask=mask,
        loss_mask=mask & (columns >= prompt.unsqueeze(-1)),
        domains=("",) * len(rows),
    )


def pair_batch(ragged: Ragged, vocabulary: int, step: int) -> PreferenceBatch:
    """Return the pairs of a step."""
    both = pairs(ragged, vocabulary, step)
    width = max(len(side) for pair in both for side in pair)
    chosen, chosen_mask = padded([pair[0] for pair in both], width)
    rejected, rejected_mask = padded([pair[1] for pair in both], width)
    return PreferenceBatch(
        chosen_input_ids=chosen,
        chosen_attention_mask=chosen_mask,
        rejected_input_ids=rejected,
        rejected_attention_mask=rejected_mask,
        chosen_length=chosen_mask.sum(-1),
        rejected_length=rejected_mask.sum(-1),
        margin=torch.zeros(len(both)),
        domains=("",) * len(both),
        row_ids=torch.arange(len(both)),
    )


def padded(rows: list[list[int]], width: int = 0) -> tuple[Tensor, Tensor]:
    """Return ids `[B, T]` padded on the right, and which of them are tokens."""
    width = width or max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(width) < lengths.unsqueeze(-1)


if __name__ == "__main__":
    worker_main(run)
