"""Gain against KL of several settings of one objective: interpolation, area and intervals.

The curve of one seed joins its settings by straight lines in the order of their KL; nothing is
extrapolated. Gain at a KL, and the mean gain over a range of KL, are weighted sums `sum w_i g_i` of
the settings' gains, whose error over prompts is at most `sum w_i sd_i`: all settings are asked the
same prompts, so their errors are not independent, and this bound holds for any correlation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING, NamedTuple

from scipy import stats

from rlhf_lightning.evaluation.win_rate import CONFIDENCE

if TYPE_CHECKING:
    from benchmarks.studies.run import Results

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


def comparison(results: Results, at_kl: Sequence[float], *, gain: str = "val/gold_win_rate") -> str:
    """Return each row's gain at equal KL, and its differences from the first row, in Markdown.

    A row is compared where all its seeds ended and measured `gain`. The interval of a difference is
    of 95 %; correct it for the number of differences. KL of the best of n is an upper bound.
    """
    curves = _curves(results, gain)
    if not curves:
        return ""
    same = not gain.endswith("gold_win_rate")  # seeds of the built-in world have other prompts
    lines = [["row", *(f"KL {kl:g}" for kl in at_kl)], ["---"] * (1 + len(at_kl))]
    for name, seeds in curves.items():
        at = [[gain_at(points, kl) for points in seeds.values()] for kl in at_kl]
        lines.append(
            [name, *(_shown([v for v in of if v is not None], len(of), same) for of in at)]
        )
    first, *others = curves
    lines += [[""], ["difference", f"from {first}"], ["---", "---"]]
    for name in others:
        seeds = [s for s in curves[name] if s in curves[first]]
        both = [(curves[name][seed], curves[first][seed]) for seed in seeds]
        reach = common_range([curve for pair in both for curve in pair])
        if reach is not None:
            means = [[mean_gain(curve, *reach) for curve in pair] for pair in both]
            found = [difference(a, b) for a, b in means if a is not None and b is not None]
            where = f"KL {reach[0]:.2f} to {reach[1]:.2f}"
            lines.append([name, f"{_shown(found, len(found), same)} on average from {where}"])
    return "\n".join("| " + " | ".join(line) + " |" if line != [""] else "" for line in lines)


def _curves(results: Results, gain: str) -> Mapping[str, Mapping[int, list[Measured]]]:
    curves: dict[str, dict[int, list[Measured]]] = {}
    for (row, _), seeds in results.items():
        for seed, one in seeds.items():
            kl, value = one.metrics.get("val/kl_per_token"), one.metrics.get(gain)
            low, high = (one.metrics.get(f"{gain}_{end}") for end in ("low", "high"))
            if kl is not None and value is not None:
                sd = 0.0 if low is None or high is None else prompt_error(low, high)
                curves.setdefault(row, {}).setdefault(seed, []).append(Measured(kl, value, sd))
    return curves


def _shown(values: Sequence[Measured], wanted: int, same_prompts: bool) -> str:
    if len(values) < wanted or not values:
        return f"reached by {len(values)} of {wanted} seeds"
    found = over_seeds(values, same_prompts=same_prompts)
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"
