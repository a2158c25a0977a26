"""The final figures of each stage, under the fixed keys of the run folder's summary."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.evaluation.policy import (
    GoldReward,
    PolicyAnswers,
    Sampling,
    compare,
    describe_answers,
    gold_details,
    gold_scores,
    sample_answers,
    side_by_side,
)
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.score import RewardModelScorer, Scorer
from rlhf_lightning.runs.summary import GateResult

logger = logging.getLogger(__name__)
EQUAL_SCORES = 1e-6  # of their size: what fp32 rounding alone makes of equal scores


@dataclass
class Findings:
    """What the end of a stage measured.

    Args:
        metrics: flat, final.
        samples: rows for samples.jsonl.
    """

    metrics: dict[str, float]
    samples: list[dict[str, Any]] = field(default_factory=list)


def compare_policies(
    policy: PolicyModel,
    baseline: PolicyModel,
    batches: Iterable[PromptBatch],
    sampling: Sampling,
    *,
    seed: int,
    gold: GoldReward | None,
    scorer: Scorer | None,
    num_samples: int,
) -> Findings:
    """Compare a policy with where it started, one response each to every held-out prompt.

    The two draw with different noise. KL is the mean k1 over the policy's response tokens.
    """
    batches = list(batches)
    noise = RowNoise(seed, "evaluation")
    mine = sample_answers(policy, batches, sampling, noise=noise, reference=baseline, scorer=scorer)
    theirs = sample_answers(baseline, batches, sampling, noise=noise.at_iteration(1), scorer=scorer)
    metrics = describe_answers(mine, "val/") | describe_answers(theirs, "val/baseline_")
    metrics["val/kl_per_token"] = sum(mine.kl) / max(sum(mine.lengths), 1)
    metrics["val/kl_per_response"] = sum(mine.kl) / len(mine.kl)
    metrics["val/num_prompts"] = float(len(mine.prompts))
    if scorer is None:
        del metrics["val/score"], metrics["val/baseline_score"]
    else:
        metrics |= compare(mine.scores, theirs.scores, "val/score_win_rate")
    if gold is not None:
        metrics |= _gold_metrics(gold, mine, theirs)
    return Findings(metrics, side_by_side(mine, theirs, num_samples))


def _gold_metrics(gold: GoldReward, mine: PolicyAnswers, theirs: PolicyAnswers) -> dict[str, float]:
    my_gold, their_gold = gold_scores(gold, mine), gold_scores(gold, theirs)
    metrics = compare(my_gold, their_gold, "val/gold_win_rate")
    metrics["val/gold"] = sum(my_gold) / len(my_gold)
    metrics["val/baseline_gold"] = sum(their_gold) / len(their_gold)
    for prefix, answers in (("val/", mine), ("val/baseline_", theirs)):
        details = gold_details(gold, answers)
        metrics |= {f"{prefix}{name}": value for name, value in details.items()}
    for domain in sorted(set(mine.domains) - {""}):
        rows = [i for i, name in enumerate(mine.domains) if name == domain]
        rate = compare(
            [my_gold[i] for i in rows], [their_gold[i] for i in rows], "val/gold_win_rate"
        )
        metrics[f"val/gold_win_rate_{domain}"] = rate["val/gold_win_rate"]
    return metrics


@torch.no_grad()
def normalize_reward_model(
    model: ScalarHeadModel,
    policy: PolicyModel,
    batches: Iterable[PromptBatch],
    sampling: Sampling,
    *,
    seed: int,
) -> dict[str, float]:
    """Fold mean 0 and std 1 over the SFT policy's samples into the reward model's head.

    A model that gives all samples one score, or one that is not finite, is left as it is, and a
    warning says so: what it was trained to can still be looked at.

    Returns:
        `reward/sample_mean` and `reward/sample_std` before, so that they can be undone; nothing
        where the model was left as it is.
    """
    scorer = RewardModelScorer(lambda: model, micro_batch_size=sampling.micro_batch_size)
    scorer.model = model
    was_training = model.training
    model.eval()
    answers = sample_answers(
        policy, batches, sampling, noise=RowNoise(seed, "normalization"), scorer=scorer
    )
    scores = torch.tensor(answers.scores, dtype=torch.float64)
    mean, std = float(scores.mean()), float(scores.std(correction=0))
    model.train(was_training)
    if not std > EQUAL_SCORES * max(1.0, abs(mean)) or not math.isfinite(mean + std):
        logger.warning(
            "the reward model is not normalized: it scores all %d samples of the policy alike "
            "(mean %g, standard deviation %g). It has learnt nothing that tells them apart, and "
            "PPO would gain nothing from it",
            len(scores),
            mean,
            std,
        )
        return {}
    model.normalize(mean, std)
    return {"reward/sample_mean": mean, "reward/sample_std": std}


def check_gates(
    gates: Mapping[str, Mapping[str, Any]], metrics: Mapping[str, float]
) -> tuple[GateResult, ...]:
    """Hold final metrics against thresholds.

    Args:
        gates: name -> {metric, at_least or at_most}.
        metrics: final metrics.

    Raises:
        ValueError: if a gate gives not exactly one of at_least and at_most.
    """
    return tuple(_check_gate(name, gate, metrics) for name, gate in gates.items())


def _check_gate(name: str, gate: Mapping[str, Any], metrics: Mapping[str, float]) -> GateResult:
    bounds = [key for key in ("at_least", "at_most") if gate.get(key) is not None]
    if len(bounds) != 1:
        raise ValueError(f"gate {name} needs exactly one of at_least and at_most, got {bounds}")
    metric, threshold = gate["metric"], float(gate[bounds[0]])
    value = metrics.get(metric)
    if value is None or math.isnan(value):
        return GateResult(name, None, threshold, False, f"{metric} was not measured")
    passed = value >= threshold if bounds[0] == "at_least" else value <= threshold
    wanted = f"{bounds[0].replace('_', ' ')} {threshold:g}"
    return GateResult(name, value, threshold, passed, f"{metric} is {value:.3f}, wanted {wanted}")
