"""What asks a run to save or to stop, and the answer on which all ranks agree."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from signal import SIGTERM, SIGUSR1, SIGUSR2

from lightning.pytorch import Trainer

from rlhf_lightning.distributed import agreed_max
from rlhf_lightning.runs.stopping import SaveClock, SignalWatch

# The larger, the more it asks for; what one rank says is done by all.
_SAVE, _DEADLINE, _USR1, _USR2, _TERM = 1, 2, 3, 4, 5
_SIGNALS = {SIGUSR1: _USR1, SIGUSR2: _USR2, SIGTERM: _TERM}


@dataclass(frozen=True)
class Request:
    """What was agreed on at the end of an iteration.

    Args:
        save: save now, besides what is due.
        stop: why to stop once it is saved; None to go on.
    """

    save: bool = False
    stop: str | None = None


class StopRequests:
    """Signals, minutes and a deadline, asked at the end of each iteration.

    Args:
        clock: of minutes and deadline.
    """

    def __init__(self, clock: SaveClock) -> None:
        self.clock = clock
        self.signals = SignalWatch()

    def start(self) -> None:
        """Watch from now on."""
        self.clock.start()
        self.signals.start()

    def stop(self) -> None:
        """Watch no more."""
        self.signals.stop()

    def agreed(self, trainer: Trainer) -> Request:
        """Return what at least one rank asks for; every rank calls it equally often."""
        code = agreed_max(self._own(), trainer.strategy.root_device)
        if code <= _SAVE:
            return Request(save=code == _SAVE)
        if code == _DEADLINE and self.clock.deadline is not None:
            moment = datetime.fromtimestamp(self.clock.deadline).isoformat(" ", "seconds")
            return Request(save=True, stop=f"another iteration could last beyond {moment}")
        names = {value: number.name for number, value in _SIGNALS.items()}
        return Request(save=True, stop=names[code])

    def _own(self) -> int:
        if self.signals.received is not None:
            return _SIGNALS[self.signals.received]
        if self.clock.must_stop():
            return _DEADLINE
        return _SAVE if self.clock.save_is_due() else 0
