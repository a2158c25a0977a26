"""Learning-rate schedules over iterations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rlhf_lightning.arguments import Fraction, checked


@checked
@dataclass(frozen=True)
class Schedule:
    """A factor on the learning rate: linear warm-up, then constant, linear or cosine decay to 0.

    Args:
        name: "constant", "linear" or "cosine".
        warmup_fraction: share of the iterations that warm up.

    Raises:
        ValueError: for another name, or a fraction outside 0 <= f < 1.
    """

    name: Literal["constant", "linear", "cosine"] = "linear"
    warmup_fraction: Fraction = 0.0

    def factor(self, iteration: int, num_iterations: int) -> float:
        """Return the factor of the iteration that follows `iteration` finished ones."""
        warmup = math.ceil(self.warmup_fraction * num_iterations)
        if iteration < warmup:
            return (iteration + 1) / warmup
        if self.name == "constant":
            return 1.0
        done = min((iteration - warmup) / max(num_iterations - warmup, 1), 1.0)
        return 1.0 - done if self.name == "linear" else 0.5 * (1 + math.cos(math.pi * done))
