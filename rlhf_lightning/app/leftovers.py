"""Threads and processes of the user's own code that would hold a finished command for ever."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PATIENCE_SECONDS = 10.0
_POLL_SECONDS = 0.1


@contextmanager
def ending_without_them() -> Iterator[None]:
    """End the process soon after the block, even if threads or child processes are still running.

    They are named; the exit code is that of the block.
    """
    code = 1
    try:
        yield
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        threading.Thread(target=_watch, args=(code,), daemon=True).start()


def _watch(code: int) -> None:
    """Leave once the interpreter ends and waits for something."""
    while not getattr(threading, "_SHUTTING_DOWN", not threading.main_thread().is_alive()):
        time.sleep(_POLL_SECONDS)  # a notebook or a test continues after a command
    while True:
        time.sleep(PATIENCE_SECONDS)
        children = [p.name for p in multiprocessing.active_children() if not p.daemon]
        if left := [thread.name for thread in _threads()] + children:
            with suppress(OSError, ValueError):
                names = ", ".join(left)
                sys.stderr.write(f"the command is done: it ends without {names}, still at work\n")
                sys.stderr.flush()
            os._exit(code)


def _threads() -> list[threading.Thread]:
    others = (threading.main_thread(), threading.current_thread())
    return [t for t in threading.enumerate() if t not in others and not t.daemon]
