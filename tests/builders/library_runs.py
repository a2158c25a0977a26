"""Runs from Python in a run folder: one that stops in the middle and goes on is the same run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from rlhf_lightning import trainer_arguments
from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.runs.folder import read_metrics

FIELDS = (
    "sequences",
    "response_mask",
    "finish_reason",
    "sampler_logprobs",
    "logprobs",
    "ref_logprobs",
    "values",
    "scores",
    "rewards",
    "advantages",
)


def fit_in(
    folder: Path, module: Any, data: Any, *, ckpt_path: str | None = None, **flags: Any
) -> L.Trainer:
    """Train for four iterations, unless `flags` say otherwise, as a user's program does."""
    given = {"max_iterations": 4, "accelerator": "cpu", "enable_progress_bar": False}
    trainer = L.Trainer(**trainer_arguments(folder, **given | flags))
    trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=True)
    return trainer


class Stop(L.Callback):
    """Fails behind the second iteration."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 1:
            raise RuntimeError("the power went")


def rows(folder: Path) -> list[dict[str, float]]:
    """Return the rows of `metrics.csv` without the times."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))}
        for row in read_metrics(folder / "metrics.csv")
    ]


def samples(folder: Path) -> list[str]:
    return (folder / "samples.jsonl").read_text().splitlines()


def assert_same_weights(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    found = ours.state_dict()
    for name, value in theirs.state_dict().items():
        assert torch.equal(found[name], value), name


def assert_same_rollouts(ours: Sequence[RolloutBatch], theirs: Sequence[RolloutBatch]) -> None:
    """Check the rollouts of a run that went on against the last ones of the whole run."""
    for mine, other in zip(ours, theirs[-len(ours) :], strict=True):
        for name in FIELDS:
            found, wanted = getattr(mine, name), getattr(other, name)
            assert found is wanted is None or torch.equal(found, wanted), name
