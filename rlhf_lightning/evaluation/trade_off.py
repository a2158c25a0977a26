"""Gain against KL of several settings of one objective: interpolation, area and intervals.

The curve of one seed joins its settings by straight lines in the order of their KL; nothing is
extrapolated. Gain at a KL, and the mean gain over a range of KL, are weighted sums `sum w_i g_i` of
the settings' gains, whose error over prompts is at most `sum w_i sd_i`: all settings are asked the
same prompts, so their errors are not independent, and this bound holds for any correlation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

from scipy import stats

from rlhf_lightning.evaluation.win_rate import CONFIDENCE

_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


class Measured(NamedTuple):
    """A run, or a weighted sum of runs of one seed.

    Args:
        kl: from the SFT policy.
        gain: such as the gold win rate.
        sd: standard error of `gain` over prompts; 0 where it is not known.
    """

    kl: float
    gain: float
    sd: float = 0.0


class Estimate(NamedTuple):
    """A mean over seeds with its interval; `low` and `high` are NaN where none is known."""

    value: float
    low: float
    high: float
    num_seeds: int

    @property
    def excludes_zero(self) -> bool:
        """True if the interval has one sign, and a width: equal seeds alone show no spread."""
        return self.low < self.high and (self.low > 0 or self.high < 0)


def prompt_error(low: float, high: float) -> float:
    """Return the standard error over prompts that an interval of 95 % stands for."""
    return (high - low) / (2 * _Z)


def gain_at(points: Sequence[Measured], kl: float) -> Measured | None:
    """Return the gain at a KL between the settings of one seed; None beyond them."""
    curve = sorted(points)
    for first, second in pairwise(curve):
        if first.kl <= kl <= second.kl:
            width = second.kl - first.kl
            share = (kl - first.kl) / width if width else 0.5
            gain = (1 - share) * first.gain + share * second.gain
            return Measured(kl, gain, (1 - share) * first.sd + share * second.sd)
    return None


def mean_gain(points: Sequence[Measured], low: float, high: float) -> Measured | None:
    """Return the area under the curve of one seed from `low` to `high`, divided by its width.

    None where the settings do not reach both ends.
    """
    ends = gain_at(points, low), gain_at(points, high)
    if ends[0] is None or ends[1] is None or not high > low:
        return None
    inside = [p for p in sorted(points) if low < p.kl < high]
    area = error = 0.0
    for first, second in pairwise([ends[0], *inside, ends[1]]):
        area += (second.kl - first.kl) * (first.gain + second.gain) / 2
        error += (second.kl - first.kl) * (first.sd + second.sd) / 2
    return Measured((low + high) / 2, area / (high - low), error / (high - low))


def common_range(curves: Sequence[Sequence[Measured]]) -> tuple[float, float] | None:
    """Return the KLs that every curve reaches, None where there are none."""
    low = max((min(p.kl for p in curve) for curve in curves), default=math.inf)
    high = min((max(p.kl for p in curve) for curve in curves), default=-math.inf)
    return (low, high) if low < high else None


def over_seeds(
    values: Sequence[Measured], *, same_prompts: bool, confidence: float = CONFIDENCE
) -> Estimate:
    """Return the mean gain over seeds with an interval over prompts and seeds.

    With S seeds, their standard deviation s and the mean variance v over prompts, the half-width
    is

    * `max(t s / sqrt(S), z sqrt(v / S))` where each seed has different prompts: the spread between
      seeds holds that between prompts, and seeds that agree by luck are no surer than their
      prompts. t is Student's quantile of S - 1 degrees of freedom.
    * `sqrt((t s / sqrt(S))^2 + z^2 v)` where all seeds use the same prompts, whose luck they share.
    z is the normal quantile. It is wider than 95 %: the luck of the responses is in both.
    * `z sqrt(v)` for one seed: it holds for new prompts, and not for new seeds.

    Args:
        values: one value per seed.
        same_prompts: whether all seeds use the same prompts.
        confidence: coverage of the interval.
    """
    gains, count = [value.gain for value in values], len(values)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    variance = fmean(value.sd**2 for value in values)
    mean, of_prompts = fmean(gains), z * math.sqrt(variance)
    if count == 1:
        half = of_prompts or math.nan
    else:
        student = float(stats.t.ppf((1 + confidence) / 2, count - 1))
        of_seeds = student * stdev(gains) / math.sqrt(count)
        own = max(of_seeds, of_prompts / math.sqrt(count))
        half = math.hypot(of_seeds, of_prompts) if same_prompts else own
        if same_prompts and not variance:  # how far prompts spread it is not known
            half = math.nan
    return Estimate(mean, mean - half, mean + half, count)


def difference(ours: Measured, theirs: Measured) -> Measured:
    """Return the difference of two objectives in one seed.

    Both respond to the same prompts, so the variance over prompts is at most the sum of both unless
    what helps one hurts the other.
    """
    return Measured(ours.kl, ours.gain - theirs.gain, math.hypot(ours.sd, theirs.sd))
