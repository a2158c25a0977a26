"""Stopping a run before its end: on a signal, or in time before a deadline."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from types import FrameType
from typing import Any

# Slurm sends SIGTERM before it ends a job, SIGUSR1 if sbatch was told --signal=USR1@SECONDS, and
# SIGUSR2 if submitit told it; a terminal that is closed sends SIGHUP.
STOP_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
SLURM = "slurm"
SLURM_END = "SLURM_JOB_END_TIME"  # seconds since 1970

_DURATION = re.compile(r"(?:(\d+)d)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:(\d+)s)?")
_SECONDS = (86400, 3600, 60, 1)
# What a deadline leaves room for, in the longest iteration and the longest save so far.
_ITERATIONS_IN_RESERVE = 1.25
_SAVES_IN_RESERVE = 2


class RunStoppedError(BaseException):
    """The run stopped before its end on request; it can be continued.

    It is no `Exception`, so that no library handles it as an error and continues.
    """


def stop_behind(error: BaseException) -> BaseException | None:
    """Return the Control-C or the request to stop that `error` is, or came from; None without."""
    seen: set[int] = set()  # `raise error from error` makes a circle
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if isinstance(found, KeyboardInterrupt | RunStoppedError):
            return found
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return None


def deadline(text: str, *, started: float) -> float:
    """Return the moment that `text` means, in seconds since 1970.

    Args:
        text: a time after the start (`3h50m`, `90m`, `1d2h30m`, `45s`), a moment in ISO format
            (`2026-11-22T06:30`, in the local zone unless it names one), or `slurm` for the end of
            this Slurm job.
        started: when the run's process started, in seconds since 1970.

    Raises:
        ValueError: if it is none of these, or a moment before the start.
    """
    if text == SLURM:
        if SLURM_END not in os.environ:
            raise ValueError(f"{text!r} needs {SLURM_END} in the environment: give 3h50m")
        return float(os.environ[SLURM_END])
    found = _DURATION.fullmatch(text.strip())
    if found and any(found.groups()):
        parts = zip(found.groups(), _SECONDS, strict=True)
        return started + sum(int(number or 0) * unit for number, unit in parts)
    try:
        moment = datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise ValueError(f"{text!r} is no time: 3h50m, 2026-11-22T06:30 or slurm is") from error
    if moment <= started:
        raise ValueError(f"{text!r} is before the start of the run")
    return moment


class SaveClock:
    """The times at which to save, and to stop so that a deadline is kept.

    Args:
        every_minutes: minutes between two checkpoints; None for no such rule.
        deadline: time by which the last checkpoint must be on disk, in seconds since 1970.
    """

    def __init__(
        self, *, every_minutes: float | None = None, deadline: float | None = None
    ) -> None:
        self.deadline = deadline
        self._interval = None if every_minutes is None else 60 * every_minutes
        self._longest_iteration = self._longest_save = 0.0  # seconds
        self.start()

    def start(self) -> None:
        """Begin to measure the first iteration."""
        self._last_iteration = self._last_save = time.time()

    def end_iteration(self) -> None:
        """Note how long the iteration took, with the validation that belongs to it."""
        now = time.time()
        self._longest_iteration = max(self._longest_iteration, now - self._last_iteration)
        self._last_iteration = now

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Note how long a save takes, which belongs to no iteration."""
        before = time.time()
        yield
        self._last_iteration = self._last_save = time.time()
        self._longest_save = max(self._longest_save, self._last_save - before)

    def save_is_due(self) -> bool:
        """Return whether `every_minutes` have passed, or a first save must show what one takes."""
        if self.deadline is not None and not self._longest_save:
            return True
        return self._interval is not None and time.time() - self._last_save >= self._interval

    def must_stop(self) -> bool:
        """Return whether one more iteration and its save could end after the deadline."""
        if self.deadline is None:
            return False
        reserve = _ITERATIONS_IN_RESERVE * self._longest_iteration
        return time.time() + reserve + _SAVES_IN_RESERVE * self._longest_save >= self.deadline


def _taken_over(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Give the signals to a handler and return the former ones; what is ignored stays so.

    `nohup` ignores SIGHUP for what it starts. Only the main thread may; elsewhere nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def _give_back(former: Mapping[signal.Signals, Any]) -> None:
    for number, handler in former.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


class SignalWatch:
    """Notes the signals that ask a process to stop, while it watches.

    Args:
        when: returns when the process is going to stop, which is told at once; "" tells nothing.
    """

    def __init__(self, when: Callable[[], str] = lambda: "") -> None:
        self._when = when
        self.received: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}

    def start(self) -> None:
        """Take the signals over."""
        self.received = None
        self._former = self._former or _taken_over(self._note)

    def stop(self) -> None:
        """Give them back."""
        _give_back(self._former)
        self._former = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        first = self.received is None
        self.received = signal.Signals(number)
        if first and (when := self._when()):
            with suppress(OSError):  # not by sys.stderr, which the signal may have interrupted
                os.write(2, f"{self.received.name}: {when}\n".encode())


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Raise `RunStoppedError` at once when a signal asks to stop.

    For what comes before and after training; in between, a `SignalWatch` waits for the end of an
    iteration. Further signals, as a launcher and a shell send them, do not interrupt the ending.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        _taken_over(lambda *_: None)
        raise RunStoppedError(f"{signal.Signals(number).name} outside of training")

    former = _taken_over(stop)
    try:
        yield
    finally:
        _give_back(former)
