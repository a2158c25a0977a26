"""The win rate of a policy's responses over a baseline's."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_lightning.functional.statistics import interval_over_groups, wilson_interval

CONFIDENCE = 0.95


def share(key: str, successes: float, count: float) -> dict[str, float]:
    """Return `successes / count` as `key`, its Wilson 95 % interval as `<key>_low` and `_high`."""
    low, high = wilson_interval(successes, count, confidence=CONFIDENCE)
    return {key: successes / count, f"{key}_low": low, f"{key}_high": high}


def share_over_groups(
    key: str, hits: Sequence[bool], groups: Sequence[Hashable]
) -> dict[str, float]:
    """Return the share of hits as `key`, its 95 % interval as `<key>_low` and `_high`.

    Trials of one group, such as a prompt, are no independent trials: see `interval_over_groups`.
    """
    low, high = interval_over_groups(hits, groups, confidence=CONFIDENCE)
    return {key: sum(hits) / len(hits), f"{key}_low": low, f"{key}_high": high}


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
    confidence: float,
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
        ValueError: if the numbers of scores differ, a score is NaN, `tolerance` is negative, or
            `confidence` is not between 0 and 1.

    Source: Wilson 1927 (the interval).
    """
    policy = torch.as_tensor(policy_scores, dtype=torch.float64).flatten()
    baseline = torch.as_tensor(baseline_scores, dtype=torch.float64).flatten()
    if len(policy) != len(baseline):
        raise ValueError(
            f"baseline_scores has {len(baseline)} scores for {len(policy)} policy_scores: give "
            "one of each a prompt, in the same order"
        )
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance} must be 0 or more: use 0.0 for exact ties")
    missing = int((policy.isnan() | baseline.isnan()).sum())
    if missing:
        raise ValueError(
            f"{missing} of {len(policy)} score pairs hold NaN, which neither wins nor loses: leave "
            "those prompts out of both, or score them"
        )
    # Equal infinities differ by NaN, and are a tie.
    tie = ((policy - baseline).abs() <= tolerance) | (policy == baseline)
    wins = int(((policy > baseline) & ~tie).sum())
    ties = int(tie.sum())
    n = len(policy)
    successes = wins + ties / 2
    low, high = wilson_interval(successes, n, confidence=confidence)
    return WinRate(wins, ties, n - wins - ties, successes / n if n else math.nan, low, high)
