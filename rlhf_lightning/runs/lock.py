"""Locks that the kernel gives back when their process ends, however it ends."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2


@contextmanager
def artifact_lock(
    folder: Path | str,
    *,
    report: Callable[[str], None] = logger.warning,
    every_seconds: float = 30.0,
) -> Iterator[None]:
    """Hold the lock of an artefact folder; wait for whoever holds it, and say so.

    The lock is `flock` on `.<name>.lock` beside the folder. The kernel drops it when the holder
    dies, so a lock left by a killed process does not exist; the lock file itself stays, because
    deleting it would let two processes lock two different files of one name. Look for the
    artefact again once the lock is held: the other process may have made it.

    Args:
        folder: the artefact folder, which need not exist.
        report: gets the waiting message, at once and then every `every_seconds`.
        every_seconds: how often the message is repeated.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("a+") as file:
        started = next_report = time.monotonic()
        while not _try_lock(file):
            if time.monotonic() >= next_report:
                waited = time.monotonic() - started
                report(
                    f"waiting for {_holder(file)}, which is making {folder} ({waited:.0f} s so far)"
                )
                next_report += every_seconds
            time.sleep(_POLL_SECONDS)
        _sign(file)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def claim_run(folder: Path | str) -> Iterator[None]:
    """Mark a run folder as being written by this process, until the block or the process ends.

    Raises:
        RuntimeError: if a living process writes into the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as file:
        if not _try_lock(file):
            raise RuntimeError(
                f"the run folder {folder} is in use by {_holder(file)}: wait for it to end, "
                "end it, or start a new run with resume=never"
            )
        _sign(file)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def is_claimed(folder: Path | str) -> bool:
    """Return whether a living process writes into the run folder."""
    try:
        with (Path(folder) / ".lock").open("r+") as file:
            if not _try_lock(file):
                return True
            fcntl.flock(file, fcntl.LOCK_UN)
    except OSError:
        return False
    return False


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(file: IO[str]) -> None:
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip() or "another process"
