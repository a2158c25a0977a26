"""Win rates with several answers a prompt, and at equal length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit
from torch import Tensor

from rlhf_lightning.functional.statistics import wilson_interval

FEW = 10  # prompts, below which a percentile bootstrap is far too narrow


class Interval(NamedTuple):
    """A mean and the ends of its interval."""

    mean: float
    low: float
    high: float

    def named(self, key: str) -> dict[str, float]:
        """Return the mean as `key`, the ends as `<key>_low` and `<key>_high`."""
        return {key: self.mean, f"{key}_low": self.low, f"{key}_high": self.high}


def bootstrap_win_rate(
    policy_scores: Tensor,
    baseline_scores: Tensor,
    *,
    confidence: float,
    seed: int,
) -> Interval:
    """Return the win rate over all pairs of answers to a prompt, its interval over prompts.

    Answers to one prompt are alike, so they are no independent trials: see `share_over_prompts`.
    With one answer a prompt use `win_rate`, whose interval is always Wilson's.

    Args:
        policy_scores: `[N, K]`, K answers to each of N prompts.
        baseline_scores: `[N, L]`.
        confidence: of the two-sided percentile interval.
        seed: of the resampling.

    Raises:
        ValueError: if the numbers of prompts differ or a score is NaN.
    """
    won = comparisons_won(policy_scores, baseline_scores)
    return share_over_prompts(won.mean((1, 2)).numpy(), confidence=confidence, seed=seed)


def comparisons_won(policy_scores: Tensor, baseline_scores: Tensor) -> Tensor:
    """Return `[N, K, L]`: 1 where the policy's answer beats the baseline's, a tie one half.

    Args:
        policy_scores: `[N, K]`, K answers to each of N prompts.
        baseline_scores: `[N, L]`.

    Raises:
        ValueError: if the numbers of prompts differ or a score is NaN.
    """
    policy, baseline = policy_scores.double(), baseline_scores.double()
    if policy.ndim != 2 or baseline.ndim != 2 or len(policy) != len(baseline):
        raise ValueError(
            f"policy_scores {list(policy.shape)} and baseline_scores {list(baseline.shape)}: give "
            "both as [prompts, responses], of the same prompts"
        )
    if bool(policy.isnan().any() | baseline.isnan().any()):
        raise ValueError("a score is NaN, which neither wins nor loses: leave that prompt out")
    difference = policy.unsqueeze(2) - baseline.unsqueeze(1)  # [N, K, L]
    return (difference > 0).double() + 0.5 * (difference == 0).double()


def share_over_prompts(by_prompt: np.ndarray, *, confidence: float, seed: int) -> Interval:
    """Return the mean of shares, one a prompt, and its interval over prompts.

    A bootstrap, in which a prompt is drawn with all that was measured on it. Resampling prompts
    that agree, or very few, says nothing of the next one: there the interval is Wilson's on the
    number of prompts, which is never too narrow for shares between 0 and 1.

    Args:
        by_prompt: `[N]`, each between 0 and 1.
        confidence: of the two-sided percentile interval.
        seed: of the resampling.

    Source: Efron 1979; Wilson 1927.
    """
    count = len(by_prompt)
    if count and (count < FEW or np.ptp(by_prompt) == 0):
        mean = float(by_prompt.mean())
        return Interval(mean, *wilson_interval(mean * count, count, confidence=confidence))
    return bootstrap_mean(by_prompt, confidence=confidence, seed=seed)


def bootstrap_mean(
    values: Sequence[float] | np.ndarray, *, confidence: float, seed: int, num_resamples: int = 2000
) -> Interval:
    """Return the mean of `values` and its percentile bootstrap interval; NaN without values."""
    sample = np.asarray(values, dtype=np.float64)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must be above 0 and below 1: use 0.95")
    if not len(sample):
        return Interval(math.nan, math.nan, math.nan)
    draw = np.random.default_rng(seed)
    means = [
        sample[draw.integers(len(sample), size=len(sample))].mean() for _ in range(num_resamples)
    ]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(sample.mean()), float(low), float(high))


def length_controlled_win_rate(
    policy_scores: Sequence[float],
    baseline_scores: Sequence[float],
    policy_lengths: Sequence[int],
    baseline_lengths: Sequence[int],
) -> float:
    """Return the win rate that a policy would have with answers as long as the baseline's.

    A logistic regression of the win (a tie counts one half) on `tanh(d / sd(d))`, d the difference
    of the lengths, with a light ridge on its slope; the answer is its prediction at d = 0. If
    lengths never differ this is the plain win rate.

    Args:
        policy_scores: one a prompt.
        baseline_scores: of the same prompts, in the same order.
        policy_lengths: tokens of the policy's answers.
        baseline_lengths: tokens of the baseline's.

    Raises:
        ValueError: if the four do not have one number a prompt, or there is no prompt.

    Source: Dubois et al. 2024 (length-controlled AlpacaEval), without its term for the prompt.
    """
    sizes = {len(policy_scores), len(baseline_scores), len(policy_lengths), len(baseline_lengths)}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"scores and lengths have {sorted(sizes)} numbers: give one of each a prompt"
        )
    scores = np.asarray(policy_scores, float) - np.asarray(baseline_scores, float)
    won = np.where(scores == 0, 0.5, (scores > 0).astype(float))
    lengths = np.asarray(policy_lengths, float) - np.asarray(baseline_lengths, float)
    spread = lengths.std()
    longer = np.tanh(lengths / spread) if spread > 0 else np.zeros_like(lengths)

    def loss(parameters: np.ndarray) -> float:
        logits = parameters[0] + parameters[1] * longer
        likelihood = won * -np.logaddexp(0, -logits) + (1 - won) * -np.logaddexp(0, logits)
        return float(-likelihood.sum() + 0.01 * parameters[1] ** 2 + 1e-6 * parameters[0] ** 2)

    intercept = minimize(loss, np.zeros(2), method="BFGS").x[0]
    return float(expit(intercept))
