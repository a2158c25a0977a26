"""The final figures of each stage, under the fixed keys of the run folder's summary."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from rlhf_lightning.batches import SFTBatch
from rlhf_lightning.data.encode import EncodedPreference
from rlhf_lightning.data.record_datamodule import RecordDataModule
from rlhf_lightning.data.summary import data_counts
from rlhf_lightning.distributed.collectives import global_sum
from rlhf_lightning.evaluation.reward_accuracy import (
    comparable_rows,
    pair_metrics,
    pair_values,
    score_pairs,
    share_right,
)
from rlhf_lightning.functional.statistics import all_equal
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.modules.reward import RewardModule
from rlhf_lightning.modules.sft import SFTModule
from rlhf_lightning.runs.folder import RunFolder, SamplesAppender

logger = logging.getLogger(__name__)
MOST_TRAINING_PAIRS = 1000  # that are scored once more, to hold against held-out ones


@dataclass
class Findings:
    """The measurements at the end of a stage.

    Args:
        metrics: final metrics, flat.
        samples: rows of samples.jsonl.
        values: values behind the metrics, for distributions.jsonl.
    """

    metrics: dict[str, float]
    samples: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

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


def trained_findings(
    module: nn.Module,
    data: RecordDataModule,
    rows: Iterable[Mapping[str, float]],
    *,
    batch_size: int,
    pairs: bool = True,
) -> Findings:
    """Return what a training shows by itself: its data, its scores, and its pairs.

    The pairs are those of a reward model: accuracies on held-out pairs and on training pairs that
    are like them, and the ceiling of the labels. A comparison and a normalization come on top.

    Args:
        module: the trained module, on its device.
        data: the data that it was trained on.
        rows: rows of metrics.csv.
        batch_size: pairs of a forward.
        pairs: False leaves the pairs out.
    """
    metrics = data_counts(list(data.summaries.values())) | score_spread(rows)
    held_out = cast("Sequence[EncodedPreference]", data.rows("validation"))
    if not pairs or not isinstance(module, RewardModule):
        return Findings(metrics)
    if (ceiling := getattr(data.source, "label_ceiling", None)) is not None:
        metrics["val/label_ceiling"] = float(ceiling())
    if not held_out:
        return Findings(metrics)
    tokenizer: Any = module.tokenizer
    how = {"batch_size": batch_size, "pad_token_id": int(tokenizer.pad_token_id)}
    scored = score_pairs(module.model, held_out, **how)
    metrics |= pair_metrics(scored)
    train = cast("Sequence[EncodedPreference]", data.rows("train"))
    if seen := comparable_rows(train, held_out, count=min(len(held_out), MOST_TRAINING_PAIRS)):
        metrics["val/train_accuracy"] = share_right(score_pairs(module.model, seen, **how)).mean
    return Findings(metrics, values=pair_values(scored, held_out, tokenizer))


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
