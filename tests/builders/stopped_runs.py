"""A run that stops in the middle and goes on: what it has written, and that it is the same run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

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
