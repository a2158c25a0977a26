"""What a detector reads at an iteration, and how an alert changes."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_lightning.evaluation.doctor.hysteresis import LEVELS
from rlhf_lightning.evaluation.doctor.illnesses import ILLNESSES

_BARE = ("share", "ratio", "correlation", "count")  # units that a sentence leaves out


@dataclass(frozen=True)
class Reading:
    """What one detector reads at one iteration.

    Args:
        value: in the detector's unit.
        level: HEALTHY, WARN or ALARM of this iteration alone.
        subject: what it is about, such as a domain; "" for the run.
    """

    value: float
    level: int
    subject: str = ""


@dataclass(frozen=True)
class Transition:
    """An alert that was raised, grew, shrank or was cleared.

    Args:
        detector: a key of `ILLNESSES`.
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
        illness = ILLNESSES[self.detector]
        about = f" ({self.reading.subject})" if self.reading.subject else ""
        word = LEVELS[self.after] if self.after else "cleared"
        side = illness.beyond if self.after else "now within"
        unit = "" if illness.unit in _BARE else f" {illness.unit}"
        return (
            f"{illness.title}{about} [{word}]: {illness.measures} {self.reading.value:.3g}{unit}, "
            f"{side} {self.threshold:g}"
        )
