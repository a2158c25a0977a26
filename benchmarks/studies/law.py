"""The law of reward model over-optimisation: gold gain over the distance from the SFT policy.

The distance is the root of the KL of a response, d = sqrt(KL), nats. Gold gains `d (a - b log d)`
in reinforcement learning and `d (a - b d)` in best-of-n sampling.

Source: Gao et al. 2022, "Scaling laws for reward model overoptimization", section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np

Way = Literal["rl", "best_of_n"]


class Point(NamedTuple):
    """Distance from the SFT policy, and gold gained over it."""

    distance: float
    gain: float


@dataclass(frozen=True)
class Law:
    """Gold gained at a distance d: `d (a - b log d)`, or of the best of n `d (a - b d)`.

    Args:
        way: way of optimisation.
        a, b: coefficients of the law.
        r2: share of the variance of gain that the fit explains; NaN where it was not fitted.
    """

    way: Way
    a: float
    b: float
    r2: float = math.nan

    def gain(self, distance: float) -> float:
        """Return the gain at a distance."""
        if distance == 0:
            return 0.0
        bend = math.log(distance) if self.way == "rl" else distance
        return distance * (self.a - self.b * bend)

    @property
    def peak(self) -> Point | None:
        """Distance and gain at which gold is highest; None where it only rises or only falls."""
        if self.b <= 0 or (self.way == "best_of_n" and self.a <= 0):
            return None
        if self.way == "rl":
            distance = math.exp(min(self.a / self.b - 1, 50.0))
            return Point(distance, self.b * distance)
        return Point(self.a / (2 * self.b), self.a**2 / (4 * self.b))


def fit_law(way: Way, points: Sequence[Point]) -> Law:
    """Return the least squares fit through points beyond distance 0.

    Raises:
        ValueError: for fewer than three of them.
    """
    kept = [point for point in points if point.distance > 0]
    if len(kept) < 3:
        raise ValueError(f"{len(kept)} points beyond distance 0: a law takes at least 3")
    d, gain = np.array(kept).T
    bend = np.log(d) if way == "rl" else d
    (a, b), *_ = np.linalg.lstsq(np.stack([d, -d * bend], 1), gain, rcond=None)
    left = gain - d * (a - b * bend)
    spread = float(((gain - gain.mean()) ** 2).sum())
    r2 = 1 - float((left**2).sum()) / spread if spread else math.nan
    return Law(way, float(a), float(b), r2)


class Slope(NamedTuple):
    """A coefficient as a line over the logarithm (base 10) of the number of parameters."""

    at_one: float
    per_decade: float

    def at(self, parameters: float) -> float:
        """Return the value at a size."""
        return self.at_one + self.per_decade * math.log10(parameters)


def over_sizes(values: Mapping[int, float]) -> Slope:
    """Return the least squares line of a coefficient over the logarithm of the size.

    Args:
        values: parameters -> coefficient, of at least two sizes.
    """
    sizes = np.log10(np.array(list(values), dtype=float))
    per_decade, at_one = np.polyfit(sizes, np.array(list(values.values())), 1)
    return Slope(float(at_one), float(per_decade))


def left_out(laws: Mapping[int, Sequence[Law]], size: int) -> Law:
    """Return the law of a size as predicted by lines through all other sizes.

    Args:
        laws: parameters -> the fits of its seeds, of at least three sizes.
        size: size to predict; its fits are not used.
    """
    others = {key: found for key, found in laws.items() if key != size}
    a = over_sizes({key: fmean(law.a for law in found) for key, found in others.items()})
    b = over_sizes({key: fmean(law.b for law in found) for key, found in others.items()})
    way = next(iter(others.values()))[0].way
    return Law(way, a.at(size), b.at(size))
