"""What is remembered of a measured quantity: how it began, how it is, and its best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Series:
    """The first values, the last ones, and the highest recent mean.

    Args:
        baseline_length: how many first values the baseline is the mean of.
        window: how many last values the recent mean is of.
        first, last: the values themselves.
        best: the highest recent mean so far.
    """

    baseline_length: int
    window: int
    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    best: float | None = None

    def add(self, value: float) -> bool:
        """Take a value that is finite; return whether its recent mean is the best so far."""
        if not math.isfinite(value):
            return False
        if len(self.first) < self.baseline_length:
            self.first.append(value)
        self.last = [*self.last, value][-self.window :]
        recent = self.recent
        if recent is None or (self.best is not None and recent <= self.best):
            return False
        self.best = recent
        return True

    @property
    def baseline(self) -> float | None:
        """The mean of the first values; None until there are enough."""
        if len(self.first) < self.baseline_length:
            return None
        return math.fsum(self.first) / len(self.first)

    @property
    def recent(self) -> float | None:
        """The mean of the last values; None until there are enough."""
        return math.fsum(self.last) / len(self.last) if len(self.last) == self.window else None

    @property
    def latest(self) -> float | None:
        """The last value."""
        return self.last[-1] if self.last else None

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint."""
        self.first, self.last = list(state["first"]), list(state["last"])
        self.best = state["best"]
