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
_taken: dict[Path, IO[str]] = {}  # run folders, with their locks


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


class FolderTakenError(RuntimeError):
    """A run folder belongs to another run; nothing in it was touched."""


@contextmanager
def claim_run(folder: Path | str, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Mark a run folder as being written by this process, until the block or the process ends.

    What `take_run` has taken is taken over.

    Args:
        folder: made if it is missing.
        check: raises where the folder is not free; called before anything is written, and again
            once the lock is held.

    Raises:
        FolderTakenError: if a living process writes into the folder.
    """
    file = _taken.pop(Path(folder).resolve(), None) or _claim(Path(folder), check)
    try:
        yield
    finally:
        file.close()  # which drops the lock


def take_run(folder: Path | str, check: Callable[[], None] = lambda: None) -> None:
    """Take a run folder for this process before the run begins, until `claim_run` takes it over.

    The arguments and what is raised are those of `claim_run`.
    """
    key = Path(folder).resolve()
    if key not in _taken:
        _taken[key] = _claim(Path(folder), check)


def is_claimed(folder: Path | str) -> bool:
    """Return whether a living process writes into the run folder; `take_run` is no writing."""
    if Path(folder).resolve() in _taken:
        return False
    try:
        with (Path(folder) / ".lock").open("r+") as file:
            if not _try_lock(file):
                return True
            fcntl.flock(file, fcntl.LOCK_UN)
    except OSError:
        return False
    return False


def _claim(folder: Path, check: Callable[[], None]) -> IO[str]:
    check()
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("a+")
    try:
        if not _try_lock(file):
            raise FolderTakenError(
                f"the run folder {folder} is in use by {_holder(file)}: wait for it to end, "
                "end it, or choose another folder with hydra.run.dir="
            )
        check()  # another run may have begun and ended in between
        _sign(file)
    except BaseException:
        file.close()
        raise
    return file


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
