"""An alert that one odd iteration neither raises nor clears."""

from __future__ import annotations

from dataclasses import asdict, dataclass

HEALTHY, WARN, ALARM = 0, 1, 2
LEVELS = ("healthy", "warn", "alarm")


@dataclass
class Hysteresis:
    """The level of one detector: up after `raise_after` readings, down after `clear_after`.

    Args:
        raise_after: readings in a row at a higher level before it is taken.
        clear_after: readings in a row at a lower level before it is left.
        level: HEALTHY, WARN or ALARM.
        above_warn, above_alarm: readings in a row at that level or a higher one.
        below: readings in a row under the present level.
    """

    raise_after: int
    clear_after: int
    level: int = HEALTHY
    above_warn: int = 0
    above_alarm: int = 0
    below: int = 0

    def update(self, reading: int | None) -> int:
        """Take one iteration's reading and return the level; None changes nothing."""
        if reading is None:
            return self.level
        self.above_warn = self.above_warn + 1 if reading >= WARN else 0
        self.above_alarm = self.above_alarm + 1 if reading >= ALARM else 0
        self.below = self.below + 1 if reading < self.level else 0
        reached = HEALTHY
        if self.above_alarm >= self.raise_after:
            reached = ALARM
        elif self.above_warn >= self.raise_after:
            reached = WARN
        if reached > self.level:
            self.level, self.below = reached, 0
        elif self.below >= self.clear_after:
            self.level, self.below = reading, 0
        return self.level

    def state_dict(self) -> dict[str, int]:
        """Return plain values for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the counts of a checkpoint; how many are needed stays as it is configured."""
        for name in ("level", "above_warn", "above_alarm", "below"):
            setattr(self, name, int(state[name]))
