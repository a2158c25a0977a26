"""Win rates and their intervals: of responses to prompts, at equal length, of two runs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import expit
from scipy.stats import t
from torch import Tensor

from rlhf_lightning.functional.statistics import (
    effective_number,
    interval_over_groups,
    wilson_interval,
)

CONFIDENCE = 0.95
Values = Sequence[float] | np.ndarray


class WinRate(NamedTuple):
    """The result of `win_rate`.

    Args:
        wins: prompts on which the policy scored higher.
        ties: prompts on which the scores differ by no more than the tolerance.
        losses: prompts on which the baseline scored higher.
        rate: `(wins + ties / 2) / n`; NaN for no prompts.
        low: lower end of the Wilson interval of `rate`.
        high: upper end of the interval.
    """

    wins: int
    ties: int
    losses: int
    rate: float
    low: float
    high: float


def win_rate(
    policy_scores: Sequence[float] | Tensor,
    baseline_scores: Sequence[float] | Tensor,
    *,
    confidence: float = CONFIDENCE,
    tolerance: float = 0.0,
) -> WinRate:
    """Return the fraction of prompts on which the policy wins, a tie counting one half.

    So `win_rate(a, b).rate + win_rate(b, a).rate == 1`. The interval is Wilson's, on the wins and
    half the ties: it is slightly too wide when there are many ties.

    Args:
        policy_scores: one score a prompt, for the policy's response.
        baseline_scores: scores of the baseline's responses to the same prompts, in the same order.
        confidence: coverage of the two-sided interval, such as 0.95.
        tolerance: largest difference that is a tie, in units of the score.

    Raises:
        ValueError: if the numbers of scores differ or a score is NaN.

    Source: Wilson 1927 (the interval).
    """
    policy = torch.as_tensor(policy_scores, dtype=torch.float64).flatten()
    baseline = torch.as_tensor(baseline_scores, dtype=torch.float64).flatten()
    if len(policy) != len(baseline) or bool((policy.isnan() | baseline.isnan()).any()):
        sizes = f"policy_scores has {len(policy)} scores, baseline_scores {len(baseline)}"
        raise ValueError(f"{sizes}: give one of each a prompt, and no NaN")
    # Equal infinities differ by NaN, and are a tie.
    tie = ((policy - baseline).abs() <= tolerance) | (policy == baseline)
    wins = int(((policy > baseline) & ~tie).sum())
    ties = int(tie.sum())
    n = len(policy)
    successes = wins + ties / 2
    low, high = wilson_interval(successes, n, confidence=confidence)
    return WinRate(wins, ties, n - wins - ties, successes / n if n else math.nan, low, high)


class Interval(NamedTuple):
    """A mean and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    def named(self, key: str) -> dict[str, float]:
        """Return the mean as `key`; the ends, where known, as `<key>_low` and `<key>_high`."""
        ends = {f"{key}_low": self.low, f"{key}_high": self.high}
        return {key: self.mean} | {name: x for name, x in ends.items() if not math.isnan(x)}


def share(successes: float, count: float) -> Interval:
    """Return `successes / count` with its Wilson interval."""
    low, high = wilson_interval(successes, count, confidence=CONFIDENCE)
    return Interval(successes / count, low, high)


def share_over_groups(hits: Sequence[bool], groups: Sequence[Hashable]) -> Interval:
    """Return the share of hits with its interval.

    Trials of one group, such as a prompt, are no independent trials: see `interval_over_groups`.
    """
    low, high = interval_over_groups(hits, groups, confidence=CONFIDENCE)
    return Interval(sum(hits) / len(hits), low, high)


def win_rate_over_prompts(policy_scores: Tensor, baseline_scores: Tensor) -> Interval:
    """Return the win rate over all pairs of responses to a prompt, its interval over prompts.

    Responses to one prompt are alike, so they are not independent trials: see `share_over_prompts`.
    With one response a prompt use `win_rate`, whose interval is Wilson's on the prompts.

    Args:
        policy_scores: `[N, K]`, K responses to each of N prompts.
        baseline_scores: `[N, L]`, L responses to the same prompts.

    Raises:
        ValueError: if the numbers of prompts differ or a score is NaN.
    """
    return share_over_prompts(comparisons_won(policy_scores, baseline_scores).mean((1, 2)).numpy())


def comparisons_won(policy_scores: Tensor, baseline_scores: Tensor) -> Tensor:
    """Return `[N, K, L]`: 1 where the policy's response beats the baseline's, a tie one half.

    Args:
        policy_scores: `[N, K]`, K responses to each of N prompts.
        baseline_scores: `[N, L]`, L responses to the same prompts.

    Raises:
        ValueError: if the numbers of prompts differ or a score is NaN.
    """
    policy, baseline = policy_scores.double(), baseline_scores.double()
    if len(policy) != len(baseline) or bool(policy.isnan().any() | baseline.isnan().any()):
        shapes = f"scores {list(policy.shape)} and {list(baseline.shape)}"
        raise ValueError(f"{shapes}: give both as [prompts, responses], and no NaN")
    difference = policy.unsqueeze(2) - baseline.unsqueeze(1)  # [N, K, L]
    return (difference > 0).double() + 0.5 * (difference == 0).double()


def share_over_prompts(by_prompt: np.ndarray) -> Interval:
    """Return the mean of shares, one a prompt, and its interval over prompts.

    Wilson's interval at the number of yes-or-no prompts that would vary as much, see
    `effective_number`. A test measures its coverage.

    Args:
        by_prompt: `[N]`, each between 0 and 1.

    Source: Wilson 1927; Dean and Pagano 2015 (Wilson's interval at an effective sample size).
    """
    mean, sizes = float(by_prompt.mean()), [1.0] * len(by_prompt)
    effective = effective_number(by_prompt.tolist(), sizes, confidence=CONFIDENCE)
    low, high = wilson_interval(mean * effective, effective, confidence=CONFIDENCE)
    return Interval(mean, low, high)


def mean_over_prompts(values: Values) -> Interval:
    """Return the mean of `values`, one a prompt, and Student's interval; NaN where unknown.

    It is unknown of one value, and of values that are all equal: how far others lie from them
    cannot be said.
    """
    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < 2 or np.ptp(sample) == 0:
        return Interval(float(sample[0]) if len(sample) else math.nan, math.nan, math.nan)
    reach = t.ppf((1 + CONFIDENCE) / 2, len(sample) - 1) * sample.std(ddof=1) / len(sample) ** 0.5
    mean = float(sample.mean())
    return Interval(mean, mean - float(reach), mean + float(reach))


def ratio_over_prompts(sums: Values, sizes: Values) -> Interval:
    """Return `sum(sums) / sum(sizes)`, such as a KL per token, and its interval over prompts.

    Student's interval of what is left, `sums - ratio * sizes`, over the mean size; NaN where it is
    not known, see `mean_over_prompts`.

    Args:
        sums: one a prompt, such as the KL of its responses.
        sizes: one a prompt, such as their tokens.

    Source: Cochran 1977, "Sampling techniques", chapter 6 (a ratio of means).
    """
    ratio, left = _ratio(np.asarray(sums, np.float64), np.asarray(sizes, np.float64))
    _, low, high = mean_over_prompts(left)
    return Interval(ratio, ratio + low, ratio + high)


def _ratio(sums: np.ndarray, sizes: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the ratio of the sums, and what each prompt moves it by, times their number."""
    ratio = float(sums.sum() / max(sizes.sum(), 1.0))
    return ratio, (sums - ratio * sizes) / max(sizes.sum() / max(len(sizes), 1), 1e-9)


def paired_differences(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> tuple[int, dict[str, Interval]]:
    """Return how a second policy differs from a first on the prompts that both were asked.

    Prompt by prompt, so that what makes a prompt easy or hard for both does not widen the
    intervals; with one seed and decoding, both were sampled with the same noise.

    Args:
        first: values of the first's comparison with a baseline, see `values_of`.
        second: values of the second's.

    Returns:
        The number of prompts, and by name `gold_win_rate` and `score_win_rate` of the second over
        the first, ties one half; `gold`, `score`, `kl_per_token`, `kl_per_response` and
        `response_length`, the second's minus the first's. KL only from one baseline, whose
        responses have the same lengths in both; score only if they have the same scores, too; gold
        not if one baseline has another gold in each.
    """
    places = [{name: at for at, name in enumerate(one["prompts"])} for one in (first, second)]
    both = [prompt for prompt in places[0] if prompt in places[1]]
    if not both:
        return 0, {}

    def values(name: str) -> list[np.ndarray]:
        """Return `[N, K]` and `[N, L]`: of the prompts of both; NaN is unknown."""
        return [
            np.array(one[name], np.float64).reshape(len(one["prompts"]), -1)[
                [place[prompt] for prompt in both]
            ]
            for one, place in zip((first, second), places, strict=True)
        ]

    def same(name: str) -> bool:
        one, other = values(name)
        return one.shape == other.shape and np.allclose(one, other, rtol=1e-3, equal_nan=True)

    found: dict[str, Interval] = {}
    one_baseline = same("baseline_length")
    judges = ["gold"] if "gold" in first and "gold" in second else []
    if one_baseline and "baseline_gold" in first and "baseline_gold" in second:
        judges = judges if same("baseline_gold") else []  # by two gold rewards
    for judge in [*judges, *(["score"] if one_baseline and same("baseline_score") else [])]:
        scores = values(judge)
        known = ~np.isnan(np.concatenate(scores, 1)).any(1)
        old, new = (score[known] for score in scores)
        if known.any():
            policy, start = torch.from_numpy(new), torch.from_numpy(old)
            found[f"{judge}_win_rate"] = win_rate_over_prompts(policy, start)
            found[judge] = mean_over_prompts(new.mean(1) - old.mean(1))
    lengths, kls = values("length"), values("kl")
    if one_baseline and any(kl.any() for kl in kls):
        pairs = zip(kls, lengths, strict=True)
        (was, old), (now, new) = (_ratio(kl.sum(1), size.sum(1)) for kl, size in pairs)
        moved = mean_over_prompts(new - old)
        found["kl_per_token"] = Interval(*(now - was + end for end in (0.0, *moved[1:])))
        found["kl_per_response"] = _difference(kls)
    found["response_length"] = _difference(lengths)
    return len(both), found


def _difference(sides: Sequence[np.ndarray]) -> Interval:
    old, new = (side.mean(1) for side in sides)
    return mean_over_prompts(new - old)


def length_controlled_win_rate(
    policy_scores: Sequence[float],
    baseline_scores: Sequence[float],
    policy_lengths: Sequence[int],
    baseline_lengths: Sequence[int],
    *,
    rows_per_prompt: int = 1,
) -> Interval:
    """Return the win rate that a policy would have with responses as long as the baseline's.

    A logistic regression of the win (a tie counts one half) on `tanh(d / sd(d))`, d the difference
    of the lengths, with a light ridge on its slope; the result is its prediction at d = 0. If
    lengths never differ this is the plain win rate.

    The interval is over prompts: that of `share_over_prompts` for what each prompt moves the
    prediction by (its influence in the regression).

    Args:
        policy_scores: one score per prompt.
        baseline_scores: scores of the same prompts, in the same order.
        policy_lengths: lengths of the policy's responses, in tokens.
        baseline_lengths: lengths of the baseline's responses, in tokens.
        rows_per_prompt: comparisons of each prompt, in a row, where there are several.

    Source: Dubois et al. 2024 (length-controlled AlpacaEval), without its term for the prompt;
    Liang and Zeger 1986 (the variance of a regression on groups).
    """
    scores = np.asarray(policy_scores, float) - np.asarray(baseline_scores, float)
    won = np.where(scores == 0, 0.5, (scores > 0).astype(float))
    lengths = np.asarray(policy_lengths, float) - np.asarray(baseline_lengths, float)
    spread = lengths.std()
    longer = np.tanh(lengths / spread) if spread > 0 else np.zeros_like(lengths)

    def loss(parameters: np.ndarray) -> float:
        logits = parameters[0] + parameters[1] * longer
        likelihood = won * -np.logaddexp(0, -logits) + (1 - won) * -np.logaddexp(0, logits)
        return float(-likelihood.sum() + 0.01 * parameters[1] ** 2 + 1e-6 * parameters[0] ** 2)

    found = minimize(loss, np.zeros(2), method="BFGS").x
    rate = float(expit(found[0]))
    terms = np.stack([np.ones_like(longer), longer], 1)  # [rows, 2]
    fitted = expit(terms @ found)
    curvature = terms.T @ (terms * (fitted * (1 - fitted))[:, None]) + np.diag([2e-6, 0.02])
    moves = ((won - fitted)[:, None] * terms) @ np.linalg.inv(curvature)[0]
    by_prompt = rate * (1 - rate) * moves.reshape(-1, rows_per_prompt).sum(1)
    shares = rate + len(by_prompt) * (by_prompt - by_prompt.mean())
    return share_over_prompts(shares)._replace(mean=rate)
