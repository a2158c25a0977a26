"""Alerts: raised, changed and cleared with hysteresis."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rlhf_lightning.doctor.catalog import DETECTORS
from rlhf_lightning.doctor.spec import ALARM, HEALTHY, LEVELS, WARN, Reading


@dataclass
class Hysteresis:
    """The level of one detector: up after `raise_after` readings, down after `clear_after`.

    Args:
        raise_after: readings in a row at a higher level before it is taken.
        clear_after: readings in a row at a lower level before it is left.
        level: HEALTHY, WARN or ALARM.
        above_warn, above_alarm: readings in a row at that level or a higher one.
        below_warn, below_alarm: readings in a row under that level.
    """

    raise_after: int
    clear_after: int
    level: int = HEALTHY
    above_warn: int = 0
    above_alarm: int = 0
    below_warn: int = 0
    below_alarm: int = 0

    def update(self, reading: int) -> int:
        """Take one iteration's reading and return the level."""
        self.above_warn = self.above_warn + 1 if reading >= WARN else 0
        self.above_alarm = self.above_alarm + 1 if reading >= ALARM else 0
        self.below_warn = self.below_warn + 1 if reading < WARN else 0
        self.below_alarm = self.below_alarm + 1 if reading < ALARM else 0
        reached = HEALTHY
        if self.above_alarm >= self.raise_after:
            reached = ALARM
        elif self.above_warn >= self.raise_after:
            reached = WARN
        if reached > self.level:
            self.level = reached
        elif self.below_warn >= self.clear_after:
            self.level = HEALTHY
        elif self.level == ALARM and self.below_alarm >= self.clear_after:
            self.level = WARN
        return self.level

    def state_dict(self) -> dict[str, int]:
        """Return plain values for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the counts of a checkpoint; how many are needed stays as it is configured."""
        for name in ("level", "above_warn", "above_alarm", "below_warn", "below_alarm"):
            setattr(self, name, int(state[name]))


_BARE = ("share", "ratio", "correlation", "count")  # units that a sentence leaves out


@dataclass(frozen=True)
class Transition:
    """An alert that was raised, grew, shrank or was cleared.

    Args:
        detector: a key of `DETECTORS`.
        before, after: levels.
        reading: of the iteration.
        threshold: the bound of the level it is about.
    """

    detector: str
    before: int
    after: int
    reading: Reading
    threshold: float

    def describe(self) -> str:
        """Return one sentence: what was read, in which unit, against which bound."""
        spec = DETECTORS[self.detector]
        about = f" ({self.reading.subject})" if self.reading.subject else ""
        word = LEVELS[self.after] if self.after else "cleared"
        side = spec.beyond if self.after else "now within"
        unit = "" if spec.unit in _BARE else f" {spec.unit}"
        return (
            f"{spec.title}{about} [{word}]: {spec.measures} {self.reading.value:.3g}{unit}, "
            f"{side} {self.threshold:g}"
        )
