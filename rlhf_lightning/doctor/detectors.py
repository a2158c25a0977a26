"""The detectors: from a run's metrics to alerts, one reading an iteration.

Pure: no model, no rank, no clock. Their memory is in their state, which goes into the checkpoint,
so that a resumed run raises the same alerts at the same iterations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rlhf_lightning.doctor.catalog import DETECTORS
from rlhf_lightning.doctor.history import History
from rlhf_lightning.doctor.spec import ALARM, HEALTHY, LEVELS, DetectorSpec, Reading
from rlhf_lightning.doctor.thresholds import DoctorThresholds


@dataclass
class Hysteresis:
    """The level of one detector: up after `raise_after` readings, down after `clear_after`.

    Args:
        raise_after: readings in a row at a higher level before it is taken.
        clear_after: readings in a row at a lower level before it is left.
        level: HEALTHY, WARN or ALARM.
        last: levels of the last readings, as many as decide.
    """

    raise_after: int
    clear_after: int
    level: int = HEALTHY
    last: list[int] = field(default_factory=list)

    def update(self, reading: int) -> int:
        """Take one iteration's reading and return the level."""
        self.last = [*self.last, reading][-max(self.raise_after, self.clear_after) :]
        count = len(self.last)
        # At least, and at most, at these levels for as long as it takes to raise, and to clear.
        lowest = min(self.last[-self.raise_after :]) if count >= self.raise_after else HEALTHY
        highest = max(self.last[-self.clear_after :]) if count >= self.clear_after else ALARM
        self.level = lowest if lowest > self.level else min(self.level, highest)
        return self.level


_BARE = ("share", "ratio", "correlation", "count")  # units that a sentence leaves out


@dataclass(frozen=True)
class Transition:
    """An alert that was raised, grew, shrank or was cleared.

    Args:
        detector: a key of `DETECTORS`.
        before, after: levels before and after.
        reading: reading of the iteration.
        threshold: the bound of the level in question.
    """

    detector: str
    before: int
    after: int
    reading: Reading
    threshold: float

    def describe(self, *, briefly: bool = False) -> str:
        """Return one sentence: what was read, in which unit, against which bound.

        Args:
            briefly: leave out how it is measured.
        """
        spec = DETECTORS[self.detector]
        about = f" ({self.reading.subject})" if self.reading.subject else ""
        word = LEVELS[self.after] if self.after else "cleared"
        side = spec.beyond if self.after else "now within"
        unit = "" if spec.unit in _BARE else f" {spec.unit}"
        found, bound = f"{self.reading.value:.3g}{unit}", f"{side} {self.threshold:g}"
        told = f"{found} ({bound})" if briefly else f"{spec.measures} {found}, {bound}"
        return f"{spec.title}{about} [{word}]: {told}"


class Detectors:
    """All detectors of a run.

    Args:
        thresholds: bounds and hysteresis of the detectors.
        num_iterations: planned iterations of the run.
    """

    def __init__(self, thresholds: DoctorThresholds, num_iterations: int) -> None:
        self.thresholds = thresholds
        self.history = History(thresholds, num_iterations)
        self.levels = {
            name: Hysteresis(spec.raise_after(thresholds), thresholds.clear_after)
            for name, spec in DETECTORS.items()
        }
        self.readings: dict[str, Reading] = {}  # the last one of each
        self.subjects: dict[str, str] = {}  # of the last one of each beyond its warning
        self.read_now: set[str] = set()  # at the last iteration
        # Iterations: all, by detector those that measured what it reads, and those that it read.
        self.iterations, self.measured, self.read = 0, Counter[str](), Counter[str]()

    @property
    def active(self) -> dict[str, int]:
        """Level of each detector that is not healthy."""
        return {name: h.level for name, h in self.levels.items() if h.level}

    @property
    def beyond(self) -> list[str]:
        """Detectors with an alert that the last iteration read beyond its warning.

        An alert stays for some healthy readings, which ask for no action.
        """
        return [name for name in self.active if name in self.read_now and self.readings[name].level]

    @property
    def idle(self) -> dict[str, str]:
        """The reason of each detector that could not have raised an alert so far.

        It has found nothing in another sense than one that watched: a run says which it was.
        """
        return {
            name: self._why_idle(spec)
            for name, spec in DETECTORS.items()
            if self.read[name] < spec.raise_after(self.thresholds)
        }

    def observe(self, iteration: int, values: Mapping[str, float]) -> list[Transition]:
        """Take one iteration's metrics and return the alerts that changed.

        Args:
            iteration: number of the iteration, from 1.
            values: results of `response_metrics` and, without their phase, the module's logged
                metrics; one that is missing or not finite leaves its detectors as they are.
        """
        fresh = {name: value for name, value in values.items() if math.isfinite(value)}
        self.history.add(iteration, fresh)
        self.iterations += 1
        self.read_now = set()
        transitions = []
        for name, spec in DETECTORS.items():
            if not spec.measured_in(fresh):
                continue
            self.measured[name] += 1
            reading = spec.reading(self.history)
            if reading is None:
                continue
            self.read[name] += 1
            self.read_now.add(name)
            self.readings[name] = reading
            if reading.level:
                self.subjects[name] = reading.subject
            before, after = self.levels[name].level, self.levels[name].update(reading.level)
            if after != before:
                bound = spec.bound(self.thresholds, after or before)
                # A healthy reading may be of another domain than the alert.
                about = replace(reading, subject=self.subjects[name])
                transitions.append(Transition(name, before, after, about, bound))
        return transitions

    def _why_idle(self, spec: DetectorSpec) -> str:
        needed = spec.first_alert(self.thresholds, self.history.num_iterations)
        count = self.measured[spec.name]
        if self.iterations and not count:
            if spec.missing_with and not self.measured[spec.missing_with]:
                spec = DETECTORS[spec.missing_with]
            return spec.missing or f"{spec.metric} was not measured"
        if count < needed:
            return f"not enough iterations: {count} of {needed}"
        return spec.unread

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {
            "levels": {name: [h.level, h.last] for name, h in self.levels.items()},
            **self.history.state_dict(),
            "readings": {name: asdict(reading) for name, reading in self.readings.items()},
            "subjects": dict(self.subjects),
            "iterations": self.iterations,
            "measured": dict(self.measured),
            "read": dict(self.read),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint; how many readings are needed stays as configured."""
        for name, (level, last) in state["levels"].items():
            self.levels[name].level, self.levels[name].last = level, list(last)
        self.history.load_state_dict(state)
        self.readings = {name: Reading(**saved) for name, saved in state["readings"].items()}
        self.subjects = dict(state["subjects"])
        self.iterations = int(state["iterations"])
        self.measured, self.read = Counter(state["measured"]), Counter(state["read"])
