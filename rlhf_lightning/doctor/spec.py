"""The specification of a detector: its words, thresholds, reading and action."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from rlhf_lightning.doctor.history import History, SharedThresholds
from rlhf_lightning.doctor.interventions import Action

HEALTHY, WARN, ALARM = 0, 1, 2
LEVELS = ("healthy", "warn", "alarm")


class Measured(NamedTuple):
    """A value with what else decides on it.

    Args:
        value: in the detector's unit.
        counts: False where it is healthy wherever the bounds are, such as one within its noise.
        subject: what it is about, such as a domain; "" for the run.
    """

    value: float
    counts: bool = True
    subject: str = ""


@dataclass(frozen=True)
class Reading:
    """The reading of one detector at one iteration.

    Args:
        value: in the detector's unit.
        level: HEALTHY, WARN or ALARM of this iteration alone.
        subject: what it is about, such as a domain; "" for the run.
    """

    value: float
    level: int
    subject: str = ""


def from_window(limits: SharedThresholds, num_iterations: int) -> int:
    """Return the first iteration with a recent mean."""
    return limits.window


@dataclass(frozen=True, eq=False)
class DetectorSpec:
    """One detector: everything that the code, the alerts, the report and docs/doctor.md use.

    Args:
        name: name in the log.
        title: heading, a few words.
        measures: description of its value.
        unit: unit of the value.
        cause: the usual cause.
        remedy: the recommended fix by hand.
        metric: without which an iteration has nothing to read; one that ends with a slash is each
            that begins so.
        value: takes the history and `metric`; None where there is no value yet.
        thresholds: its fields of `DoctorThresholds`, first the warning's bound, then the alarm's
            if there is one (`bounds` makes both), then what else it compares with. Beyond a bound
            it raises an alert: below one that is called a floor, above all others.
        counts_iterations: its value is a number of iterations, so one reading raises an alert.
        action: action of the doctor with `doctor=act`.
        serious: whether a lasting alarm may end a fit; others are reported, and training continues.
        begins: takes thresholds and number of iterations, and returns the first iteration that can
            give a value.
        missing: why the measure may never be made.
        missing_with: another detector, whose reason holds where that had nothing to read either.
        unread: why there may be no value where the measure was made often enough.
        without_model: cause and remedy of a reward that no model gives; None where they are the
            same.
    """

    name: str
    title: str
    measures: str
    unit: str
    cause: str
    remedy: str
    metric: str
    value: Callable[[History, str], Measured | float | None]
    thresholds: Mapping[str, Threshold]
    counts_iterations: bool = False
    action: Action | None = None
    serious: bool = False
    begins: Callable[[SharedThresholds, int], int] = from_window
    missing: str = ""
    missing_with: str = ""
    unread: str = "the first iterations give nothing to compare with"
    without_model: tuple[str, str] | None = None

    def advice(self, *, scored_by_model: bool) -> tuple[str, str]:
        """Return the usual cause and the fix, for a reward that a model gives or for another."""
        if scored_by_model or self.without_model is None:
            return self.cause, self.remedy
        return self.without_model

    def measured_in(self, names: Iterable[str]) -> bool:
        """Return whether these metrics include the ones it reads."""
        if self.metric.endswith("/"):
            return any(name.startswith(self.metric) for name in names)
        return self.metric in names

    @property
    def beyond(self) -> str:
        """The side of its bounds on which it raises an alert: `above` or `below`."""
        return "below" if self.bound_keys[0].endswith("_floor") else "above"

    def bound(self, limits: SharedThresholds, level: int) -> float:
        """Return its bound at WARN or ALARM; the warning's where it has no alarm."""
        warn, alarm = self.bound_keys
        return float(getattr(limits, alarm if alarm and level == ALARM else warn))

    @property
    def bound_keys(self) -> tuple[str, str | None]:
        """The names of its bounds among the thresholds: the warning's, and the alarm's if any."""
        warn, *others = self.thresholds
        return warn, next((key for key in others if "_alarm" in key), None)

    def reading(self, history: History) -> Reading | None:
        """Return what it reads at the last iteration; None where there is no value."""
        found = self.value(history, self.metric)
        if found is None:
            return None
        measured = found if isinstance(found, Measured) else Measured(found)
        if not math.isfinite(measured.value):
            return None
        level = self._level(measured.value, history.thresholds) if measured.counts else HEALTHY
        return Reading(measured.value, level, measured.subject)

    def _level(self, value: float, limits: SharedThresholds) -> int:
        # An alarm lies beyond its warning: the level is the number of bounds that are passed.
        bounds = [getattr(limits, key) for key in self.bound_keys if key]
        return sum(value > b if self.beyond == "above" else value < b for b in bounds)

    def raise_after(self, limits: SharedThresholds) -> int:
        """Return how many readings in a row raise an alert."""
        return 1 if self.counts_iterations else limits.raise_after

    def first_alert(self, limits: SharedThresholds, num_iterations: int) -> int:
        """Return the iteration at which it can raise an alert at the earliest."""
        return self.begins(limits, num_iterations) + self.raise_after(limits) - 1


class Threshold(NamedTuple):
    """A field of `DoctorThresholds`: its annotation, and its default."""

    hint: Any
    default: float


def threshold(default: float, **limits: float) -> Threshold:
    """Return a threshold of the type of its default, within limits of pydantic's `Field`."""
    keywords: Any = limits
    return Threshold(Annotated[type(default), Field(**keywords)], default)


def bounds(
    prefix: str, warn: float, alarm: float, floor: str = "", **limits: float
) -> dict[str, Threshold]:
    """Return the threshold fields `<prefix>_warn` and `<prefix>_alarm`, with `floor` behind.

    Args:
        prefix: prefix of their names.
        warn: default of the warning's bound.
        alarm: default of the alarm's bound.
        floor: "_floor" for those of a detector that alerts below them.
        **limits: limits of their values, as `threshold` takes them.
    """
    both = {"warn": warn, "alarm": alarm}
    return {f"{prefix}_{n}{floor}": threshold(value, **limits) for n, value in both.items()}
