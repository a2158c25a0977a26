"""Locks that the kernel gives back when their process ends, however it ends."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import lock_descriptor, unlock_descriptor

logger = logging.getLogger(__name__)

LOCK = ".lock"  # in a run folder
_SIGNATURE = "process {} on {}"
_OURS = re.compile(rb"(process \d+(, \d+)* on \S*)?")  # empty between its making and its signature
_EVERY_SECONDS = 30.0
_POLL_SECONDS = 0.2
_taken: dict[Path, int] = {}  # run folders, with the descriptors of their locks


@contextmanager
def artifact_lock(
    folder: Path | str,
    *,
    report: Callable[[str], None] = logger.warning,
) -> Iterator[None]:
    """Hold the lock of an artifact folder; wait for its holder, and say so.

    The lock is that of `filelock` on `.<name>.lock` beside the folder. The kernel drops it when the
    holder dies, so a lock left by a killed process does not exist; the lock file itself stays,
    because deleting it would let two processes lock two different files of one name. Look for the
    artifact again once the lock is held: the other process may have made it.

    Args:
        folder: the artifact folder, which need not exist.
        report: gets the waiting message, at once and then every 30 seconds.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / f".{folder.name}.lock"
    lock, owner = _open(path), os.getpid()
    started = due = time.monotonic()
    try:
        while not lock_descriptor(lock, blocking=False):
            if (now := time.monotonic()) >= due:
                waited, due = now - started, now + _EVERY_SECONDS
                report(
                    f"waiting for {_holder(path)}, which is making {folder} ({waited:.0f} s so far)"
                )
            time.sleep(_POLL_SECONDS)
        sign(path)
        yield
    finally:
        _release(lock, owner)


class FolderTakenError(FileExistsError, RuntimeError):
    """A folder belongs to another run or program; nothing in it was touched."""


@contextmanager
def claim_run(folder: Path | str, check: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Mark a run folder as being written by this process, until the block or the process ends.

    What `take_run` has taken is taken over. Yields the descriptor of the lock: a process that
    inherits it holds the folder, too, also if this one is killed.

    Args:
        folder: made if it is missing.
        check: raises where the folder is not free; called before anything is written, and again
            once the lock is held.

    Raises:
        FolderTakenError: if a living process writes into the folder.
    """
    lock = _taken.pop(Path(folder).resolve(), None) or _claim(Path(folder), check)
    owner = os.getpid()
    try:
        yield lock
    finally:
        _release(lock, owner)


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
        lock = _open(path)
    except OSError:  # a folder that cannot be written to
        return False
    free = lock_descriptor(lock, blocking=False)
    _release(lock)
    return not free


def is_signed(folder: Path | str) -> bool:
    """Return whether a run has claimed the folder, now or earlier."""
    path = Path(folder) / LOCK
    content = path.read_bytes() if path.is_file() else b""
    return content != b"" and _OURS.fullmatch(content) is not None


def sign(path: Path, *others: int) -> None:
    """Write into a lock's file which processes hold it: this one and those that inherited it."""
    processes = ", ".join(map(str, (os.getpid(), *others)))
    path.write_text(_SIGNATURE.format(processes, socket.gethostname()))


def _claim(folder: Path, check: Callable[[], None]) -> int:
    check()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    lock = _open(path)
    try:
        if not lock_descriptor(lock, blocking=False):
            raise FolderTakenError(
                f"the run folder {folder} is in use by {_holder(path)}: wait for it to end, "
                "end it, or choose another folder with hydra.run.dir="
            )
        check()  # another run may have begun and ended in between
        sign(path)
    except BaseException:
        _release(lock)
        raise
    return lock


def _open(path: Path) -> int:
    if path.exists() and not (path.is_file() and _OURS.fullmatch(path.read_bytes())):
        raise FolderTakenError(
            f"{path} is there already, and is no lock of ours: move it away, or use another folder"
        )
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)


def _release(lock: int, owner: int | None = None) -> None:
    """Close a lock; a forked process that ends leaves it with the `owner`."""
    with suppress(OSError):  # other code closed it: that error comes first
        if owner in (None, os.getpid()):
            unlock_descriptor(lock)  # also for processes that inherited it, such as data loaders
        os.close(lock)


def _holder(path: Path) -> str:
    return path.read_text().strip() or "another process"
