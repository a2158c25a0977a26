"""The memory of detectors: first and recent values of each measure, and notes.

All of it goes into the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rlhf_lightning.arguments import Count
from rlhf_lightning.hparams import Checked


@dataclass(frozen=True)
class SharedThresholds(Checked):
    """Settings that all detectors share; `DoctorThresholds` adds the fields of each.

    "Baseline" is the mean over the first iterations, "recent" the mean over the last ones,
    "standard deviation" that of the scores in the first iterations.

    Args:
        raise_after: iterations in a row beyond a bound before an alert is raised; where a detector
            counts iterations itself, one is enough.
        clear_after: iterations in a row within it before it is cleared.
        baseline_iterations: number of first iterations, which others are compared with.
        window: iterations of a recent mean.
    """

    raise_after: Count = 2
    clear_after: Count = 3
    baseline_iterations: Count = 4
    window: Count = 4

    if TYPE_CHECKING:  # the fields that a detector adds

        def __getattr__(self, name: str) -> float: ...


@dataclass
class MetricSeries:
    """The first values of a metric, the last ones, and the highest recent mean.

    Args:
        baseline_length: number of first values in the baseline.
        window: number of last values in the recent mean.
        first, last: first and last values.
        best: the highest recent mean so far.
    """

    baseline_length: int
    window: int
    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    best: float | None = None

    def add(self, value: float) -> bool:
        """Take a finite value; return whether its recent mean is the best so far."""
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

    @property
    def ratio(self) -> float | None:
        """The recent mean as a share of the baseline; None where that is not above 0."""
        recent, baseline = self.recent, self.baseline
        if recent is None or baseline is None or baseline <= 0:
            return None
        return recent / baseline


@dataclass
class History:
    """All series of a run, by the name of the metric.

    Args:
        thresholds: bounds, and the lengths of baseline and window.
        num_iterations: planned iterations of the run.
        iteration: the last one, from 1.
        series: series by metric.
        notes: numbers that a detector keeps from one iteration to the next.
        improved: metrics whose recent mean is the best so far at this iteration.
    """

    thresholds: SharedThresholds
    num_iterations: int
    iteration: int = 0
    series: dict[str, MetricSeries] = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)
    improved: set[str] = field(default_factory=set)

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Take one iteration's finite metrics."""
        self.iteration = iteration
        self.series |= {name: self.of(name) for name in values}
        self.improved = {name for name, value in values.items() if self.series[name].add(value)}

    def of(self, name: str) -> MetricSeries:
        """Return the series of a measure; an empty one where it was never made."""
        limits = self.thresholds
        return self.series.get(name) or MetricSeries(limits.baseline_iterations, limits.window)

    def mean_recent(self, names: Sequence[str]) -> float | None:
        """Return the mean of the recent means that are known; None where none is."""
        known = [value for name in names if (value := self.of(name).recent) is not None]
        return math.fsum(known) / len(known) if known else None

    def error(self, names: Sequence[str]) -> float:
        """Return the standard error of the difference of two recent means of one of these series.

        The variance of a metric on few responses is estimated from neighbouring iterations, over
        all series: half the mean square of their differences.
        """
        squares = [
            (after - before) ** 2 / 2
            for name in names
            for values in (self.series[name].first, self.series[name].last)
            for before, after in pairwise(values)
        ]
        variance = math.fsum(squares) / len(squares) if squares else 0.0
        return math.sqrt(2 * variance / self.thresholds.window)

    @property
    def selection(self) -> float:
        """By how much the best recent mean so far exceeds the truth by chance alone.

        In standard errors of the difference of two recent means: the largest of n independent ones
        is about sqrt(2 ln n) standard errors of one mean too high, and n grows with the run.
        """
        return math.sqrt(math.log(max(self.iteration / self.thresholds.window, 1.0)))

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {
            "series": {name: asdict(series) for name, series in self.series.items()},
            "notes": dict(self.notes),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint; lengths stay as they are configured."""
        self.series, self.notes = {}, dict(state["notes"])
        for name, saved in state["series"].items():
            series = self.series[name] = self.of(name)
            series.first, series.last = list(saved["first"]), list(saved["last"])
            series.best = saved["best"]
