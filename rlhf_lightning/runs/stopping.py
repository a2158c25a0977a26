"""Stopping a run before its end, on a signal."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

# Slurm sends SIGTERM before it ends a job, SIGUSR1 if sbatch was told --signal=USR1@SECONDS, and
# SIGUSR2 if submitit told it; a terminal that is closed sends SIGHUP.
STOP_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


class RunStoppedError(BaseException):
    """The run stopped before its end on request; it can be continued.

    It is no `Exception`, so that no library handles it as an error and continues.
    """


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it came from."""
    seen: list[BaseException] = []  # `raise error from error` makes a circle
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__


def stop_behind(error: BaseException) -> BaseException | None:
    """Return the Control-C or the request to stop that `error` is, or came from; None without."""
    stops = (KeyboardInterrupt, RunStoppedError)
    return next((one for one in causes(error) if isinstance(one, stops)), None)


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
