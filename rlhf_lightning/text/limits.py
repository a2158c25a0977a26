"""Limits for a chat template, which is a program that someone else wrote."""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SECONDS = 20.0
GIBIBYTES = 2.0
_POLL, _AGAIN, _IDLE = 0.05, 0.5, 5.0  # seconds
_STATM = Path("/proc/self/statm")


class TemplateLimitError(RuntimeError):
    """A template did not end within the limits."""


class _Stop(BaseException):
    """Raised in the thread that renders, from outside."""


@dataclass
class _Rendering:
    begun: float
    memory: float = 0.0  # of the process, when the watch first looked
    # Stopped again until it ends: Python drops what is raised in a finalizer.
    stopped: float = -math.inf


class _Watch:
    """One thread that looks after all renderings of this process, and ends when there are none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.begun: dict[int, _Rendering] = {}  # by thread
        self.thread: threading.Thread | None = None

    def begin(self) -> None:
        with self.lock:
            self.begun[threading.get_ident()] = _Rendering(time.monotonic())
            if self.thread is None or not self.thread.is_alive():  # of the process before a fork
                self.thread = threading.Thread(target=self._look, daemon=True)
                self.thread.start()

    def end(self) -> None:
        with self.lock:
            self.begun.pop(threading.get_ident(), None)
            _raise_in(threading.get_ident(), None)  # what is on its way to a rendering that ended

    def _look(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(_POLL)
            now, memory = time.monotonic(), _resident()
            with self.lock:
                last = now if self.begun else last
                if now - last > _IDLE:
                    self.thread = None
                    return
                for thread, one in self.begun.items():
                    one.memory = one.memory or memory
                    over = now - one.begun > SECONDS or memory - one.memory > GIBIBYTES
                    if over and now - one.stopped > _AGAIN:
                        one.stopped = now
                        _raise_in(thread, _Stop)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise `error` in the thread `thread` soon, or take back what has not been raised yet."""
    value = ctypes.py_object() if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), value)


def _resident() -> float:
    """Return the memory of this process in GiB; a constant where the system does not say."""
    with suppress(OSError):
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
    return 1.0


_WATCH = _Watch()


@contextmanager
def limited() -> Iterator[None]:
    """Render a template inside.

    Raises:
        TemplateLimitError: if it takes longer than `SECONDS`, more memory than `GIBIBYTES`, a
            range that is too large, or calls itself without end.
    """
    _WATCH.begin()
    try:
        try:
            yield
        finally:
            _WATCH.end()  # inside: what stops the rendering may arrive as it ends
    except (_Stop, MemoryError, OverflowError, RecursionError) as error:
        reason = "" if isinstance(error, _Stop) else f" ({type(error).__name__}: {error})"
        raise TemplateLimitError(
            f"the chat template did not end within {SECONDS:g} s and {GIBIBYTES:g} GiB{reason}: "
            "it may loop; take a model or a template that you know"
        ) from error
