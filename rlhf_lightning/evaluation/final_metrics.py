"""The final figures of each stage, under the fixed keys of the run folder's summary."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_lightning.batches import SFTBatch
from rlhf_lightning.distributed.collectives import global_sum
from rlhf_lightning.functional.statistics import all_equal
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.modules.sft import SFTModule
from rlhf_lightning.runs.folder import RunFolder, SamplesAppender

logger = logging.getLogger(__name__)


@dataclass
class Findings:
    """The measurements at the end of a stage.

    Args:
        metrics: final metrics, flat.
        samples: rows of samples.jsonl.
        values: values behind the metrics, for distributions.jsonl.
        seconds: wall-clock seconds by phase: `measure`, `export`.
    """

    metrics: dict[str, float]
    samples: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def write(self, folder: RunFolder, iteration: int) -> None:
        """Write samples and values into a run folder, in place of those of an earlier end."""
        for path, key, rows in (
            (folder.samples, "baseline_response", self.samples),
            (folder.distributions, "held_out", [self.values] if self.values else []),
        ):
            file = SamplesAppender(path)
            file.drop(key)  # of a run that was killed after this and resumed
            if rows:
                file.append(iteration, rows)


def score_spread(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return `rollout/score_std_max`: the largest spread of scores in one rollout.

    0 (up to rounding) means that there was nothing to learn.

    Args:
        rows: rows of metrics.csv.
    """
    spreads = [
        0.0 if all_equal(row["rollout/score"], std) else std
        for row in rows
        if math.isfinite(std := row.get("rollout/score_std", math.nan))
    ]
    return {"rollout/score_std_max": max(spreads)} if spreads else {}


@torch.no_grad()
def held_out_loss(module: SFTModule, policy: PolicyModel, batches: Iterable[SFTBatch]) -> float:
    """Return the mean token loss of another policy on held-out demonstrations, nats.

    Args:
        module: module that computes it, as in a validation.
        policy: whole on every rank.
        batches: batches of this rank.
    """
    device = next(policy.root.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    for cpu_batch in batches:
        batch = cpu_batch.to(device)
        num_tokens = batch.loss_mask.sum()
        loss = module.loss(batch, num_tokens, policy)
        sums += torch.stack([loss * num_tokens, num_tokens]).double()
    loss, tokens = global_sum(sums).tolist()
    return loss / max(tokens, 1)
