"""Locks that the kernel gives back when their process ends, however it ends."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

LOCK = ".lock"  # in a run folder
_SIGNATURE = "process {} on {}"
_OURS = re.compile(rb"(process \d+ on \S*)?")  # it is empty between its making and its signature
_EVERY_SECONDS = 30.0
_taken: dict[Path, FileLock] = {}  # run folders, with their locks


@contextmanager
def artifact_lock(
    folder: Path | str,
    *,
    report: Callable[[str], None] = logger.warning,
) -> Iterator[None]:
    """Hold the lock of an artefact folder; wait for its holder, and say so.

    The lock is that of `filelock` on `.<name>.lock` beside the folder. The kernel drops it when
    the holder dies, so a lock left by a killed process does not exist; the lock file itself stays,
    because deleting it would let two processes lock two different files of one name. Look for the
    artefact again once the lock is held: the other process may have made it.

    Args:
        folder: the artefact folder, which need not exist.
        report: gets the waiting message, at once and then every 30 seconds.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder.parent / f".{folder.name}.lock")
    started = time.monotonic()
    patience = 0.0
    while not _acquired(lock, patience):
        waited = time.monotonic() - started
        report(f"waiting for {_holder(lock)}, which is making {folder} ({waited:.0f} s so far)")
        patience = _EVERY_SECONDS
    try:
        _sign(lock)
        yield
    finally:
        lock.release()


class FolderTakenError(FileExistsError, RuntimeError):
    """A folder belongs to another run, or to somebody else; nothing in it was touched."""


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
    lock = _taken.pop(Path(folder).resolve(), None) or _claim(Path(folder), check)
    try:
        yield
    finally:
        lock.release()


def take_run(folder: Path | str, check: Callable[[], None] = lambda: None) -> None:
    """Take a run folder for this process before the run begins, until `claim_run` takes it over.

    The arguments and what is raised are those of `claim_run`.
    """
    key = Path(folder).resolve()
    if key not in _taken:
        _taken[key] = _claim(Path(folder), check)


def is_claimed(folder: Path | str) -> bool:
    """Return whether a living process writes into the run folder; `take_run` is no writing."""
    path = Path(folder) / LOCK
    if Path(folder).resolve() in _taken or not path.exists():
        return False
    try:
        lock = _lock(path)
        if not _acquired(lock):
            return True
    except OSError:  # a folder that cannot be written to
        return False
    lock.release()
    return False


def is_signed(folder: Path | str) -> bool:
    """Return whether a run has claimed the folder, now or earlier."""
    path = Path(folder) / LOCK
    content = path.read_bytes() if path.is_file() else b""
    return content != b"" and _OURS.fullmatch(content) is not None


def _claim(folder: Path, check: Callable[[], None]) -> FileLock:
    check()
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder / LOCK)
    if not _acquired(lock):
        raise FolderTakenError(
            f"the run folder {folder} is in use by {_holder(lock)}: wait for it to end, "
            "end it, or choose another folder with hydra.run.dir="
        )
    try:
        check()  # another run may have begun and ended in between
        _sign(lock)
    except BaseException:
        lock.release()
        raise
    return lock


def _lock(path: Path) -> FileLock:
    if path.exists() and not (path.is_file() and _OURS.fullmatch(path.read_bytes())):
        raise FolderTakenError(
            f"{path} is there already, and is no lock of ours: move it away, or use another folder"
        )
    # Never the soft lock, which outlives a process that was killed.
    return FileLock(path, thread_local=False, poll_interval=0.2, fallback_to_soft=False)


def _acquired(lock: FileLock, patience: float = 0.0) -> bool:
    try:
        lock.acquire(timeout=patience)
    except Timeout:
        return False
    return True


def _sign(lock: FileLock) -> None:
    Path(lock.lock_file).write_text(_SIGNATURE.format(os.getpid(), socket.gethostname()))


def _holder(lock: FileLock) -> str:
    return Path(lock.lock_file).read_text().strip() or "another process"
