"""The preflight: one rollout before the first update, looked at from all sides.

Legend: B rows, R response.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rlhf_lightning.batches import FINISHED_BY_STOP, PromptBatch, RolloutBatch
from rlhf_lightning.callbacks.doctor.records import Refusals, all_records, responses_of
from rlhf_lightning.distributed.collectives import agreed_max, gathered
from rlhf_lightning.doctor.metrics import response_metrics
from rlhf_lightning.doctor.preflight_checks import FirstRollout
from rlhf_lightning.models.forward import ResponseRows, by_micro_batch, response_statistics
from rlhf_lightning.modules.on_policy import OnPolicyModule
from rlhf_lightning.modules.step_0 import rounding_tolerance


class PreflightError(RuntimeError):
    """The run is not worth starting; the message names what is wrong and what to do."""


@torch.no_grad()
def first_rollout(module: OnPolicyModule, prompts: PromptBatch) -> FirstRollout:
    """Return the figures of the rollout that iteration 1 will make, over all ranks.

    Args:
        module: the module before its first update.
        prompts: prompts of iteration 1; the same noise gives the same responses again.
    """
    rollout, _ = module.collect_rollout(prompts, 0)
    skip = module.sampling.skip_special_tokens
    answers = responses_of(rollout, prompts, module.tokenizer, skip_special_tokens=skip)
    measured = response_metrics(
        all_records(rollout, answers, Refusals((), ()), None), score_clip=None
    )
    rows = [row for rank in gathered(_rows(module, rollout)) for row in rank]
    tokens = sum(row["length"] for row in rows)
    known = [row["score"] for row in rows if row["score"] is not None]
    scores = torch.tensor(known or [0.0], dtype=torch.float64)
    stops = set(getattr(module.generator, "stop_ids", ()))
    finished = [row for row in rows if row["finished"]]
    lengths = [row["length"] for row in rows]
    vocabulary = len(module.tokenizer)
    entropy = sum(row["entropy"] for row in rows) / tokens
    warmer = module.controls.temperature > 1  # which makes a trained policy's choices even, too
    return FirstRollout(
        ratio_error=sum(row["ratio_error"] for row in rows) / tokens,
        reference_error=sum(row["reference_error"] for row in rows) / tokens,
        finished=len(finished) / len(rows),
        stop_errors=sum(bool(stops) and row["last"] not in stops for row in finished),
        padded=sum(row["padded"] for row in rows) / len(rows),
        eos_known=not stops or module.tokenizer.eos_token_id in stops,
        score_mean=float(scores.mean()),
        score_std=float(scores.std(correction=0)),
        finite=bool(scores.isfinite().all()),
        length_mean=tokens / len(rows),
        shortest=min(lengths),
        longest=max(lengths),
        max_new_tokens=module.sampling.max_new_tokens,
        sampler_bias=measured["sampler_bias"],
        sampler_error=measured["sampler_error"],
        tolerance=rounding_tolerance(module),
        same_source=module.step_0.same_source,
        has_reward=rollout.has_reward,
        entropy_share=0.0 if warmer else entropy / math.log(vocabulary),
        vocabulary=vocabulary,
    )


def _rows(module: OnPolicyModule, rollout: RolloutBatch) -> list[dict[str, Any]]:
    """Return plain values of each of this rank's rows."""
    mask = rollout.response_mask
    again = _logprobs(module, rollout)
    ratio = _sum_on(mask, (again - rollout.logprobs).abs())
    reference = _sum_on(mask, (rollout.logprobs - rollout.ref_logprobs).abs())
    entropy = _sum_on(mask, rollout.entropy)
    pad, scores = module.tokenizer.pad_token_id, rollout.known_scores
    rows = []
    for i, kept in enumerate(mask.cpu()):
        ids = rollout.response_tensors[i].cpu()[kept].tolist()
        rows.append(
            {
                "length": len(ids),
                "last": ids[-1] if ids else None,
                "padded": pad in ids[:-1],
                "finished": rollout.finish_reason[i].item() == FINISHED_BY_STOP,
                "score": None if scores[i].isnan() else scores[i].item(),
                "entropy": entropy[i].item(),
                "ratio_error": ratio[i].item(),
                "reference_error": reference[i].item(),
            }
        )
    return rows


def _logprobs(module: OnPolicyModule, rollout: RolloutBatch) -> Tensor:
    """Return `[B, R]` log-probabilities as an update computes them."""

    def of_rows(rows: Tensor) -> tuple[Tensor]:
        batch = ResponseRows(
            rollout.sequences[rows], rollout.attention_mask[rows], rollout.response_mask[rows]
        )
        statistics = response_statistics(
            module.policy, batch, temperature=module.controls.temperature, with_entropy=False
        )
        return (statistics.logprobs,)

    (logprobs,) = by_micro_batch(
        of_rows, rollout.attention_mask, module.algorithm.micro_batch_size, agree=agreed_max
    )
    return logprobs


def _sum_on(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values, 0).sum(-1)
