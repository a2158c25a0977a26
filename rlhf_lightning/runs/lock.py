"""The right to write into a folder: locks that end with their process, and its guard."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import lock_descriptor, unlock_descriptor

from rlhf_lightning.runs.atomic import sync_folder, write_text
from rlhf_lightning.runs.folder import RUN_YAML, RunFolder
from rlhf_lightning.runs.summary import summary_or_none

logger = logging.getLogger(__name__)

LOCK = ".lock"  # in a run folder
HYDRA = ".hydra"  # and in it what Hydra writes
WRITTEN = ".written.json"  # in a folder that we replace: the files that we have written there
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_held: set[int] = set()  # descriptors of the locks of this process
_locks: dict[Path, int] = {}  # of run folders that are taken and not yet claimed: descriptors
_made: dict[Path, list[Path]] = {}  # of every run folder that was taken: what was made, it first


class FolderTakenError(FileExistsError, RuntimeError):
    """A folder belongs to another run or program; nothing in it was touched."""


@contextmanager
def artifact_lock(
    folder: Path | str, *, report: Callable[[str], None] = logger.warning
) -> Iterator[None]:
    """Hold the lock of an artifact folder; wait for its holder, and say so.

    Look for the artifact again once the lock is held: the other process may have made it.

    Args:
        folder: the artifact folder, which need not exist.
        report: gets the waiting message.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f".{folder.name}.lock")
    if (lock := _acquire(path)) is None:
        report(f"waiting for {_holder(path)}, which is making {folder}")
        lock = _acquire(path, blocking=True)
    try:
        yield
    finally:
        _release(lock)  # type: ignore[arg-type]


@contextmanager
def claim_run(folder: Path | str, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Mark a run folder as being written by this process, until the block or the process ends.

    What `take_run` has taken is taken over.

    Args:
        folder: made if it is missing.
        check: raises where the folder is not free; called before anything is written.

    Raises:
        FolderTakenError: if a living process writes into the folder.
    """
    take_run(folder, check)
    lock = _locks.pop(Path(folder).resolve())
    try:
        yield
    finally:
        _release(lock)


def take_run(folder: Path | str, check: Callable[[], None] = lambda: None) -> None:
    """Take a run folder for this process before the run begins, until `claim_run` takes it over.

    The arguments and what is raised are those of `claim_run`.
    """
    folder = Path(folder)
    if (key := folder.resolve()) in _locks:
        return
    check()
    made = [path for path in (key, *key.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if (lock := _acquire(folder / LOCK)) is None:
        user = _holder(folder / LOCK)
        raise FolderTakenError(
            f"{folder} is in use by {user}: wait, or choose another hydra.run.dir="
        )
    _locks[key], _made[key] = lock, made


def is_claimed(folder: Path | str) -> bool:
    """Return whether a living process writes into the run folder; `take_run` is no writing."""
    path = Path(folder) / LOCK
    if Path(folder).resolve() in _locks or not path.exists():
        return False
    try:
        if (lock := _acquire(path)) is not None:
            _release(lock)
    except OSError:  # a folder that cannot be written to
        return False
    return lock is None


def check_free(
    folder: RunFolder, stage: str, *, log: str = "", begun: bool = False, also: Collection[str] = ()
) -> None:
    """Check that a new run may write into a folder; nothing is written here.

    It may if the folder is missing or empty, or belongs to a run of the same kind that ended before
    its first checkpoint: nothing in it can be lost. Foreign files are never touched.

    Args:
        folder: folder of the run.
        stage: stage of the run.
        log: name of Hydra's log, which a run has written before its summary.
        begun: whether Hydra may have written there by now, as in the folder of a sweep's job.
        also: names of what loggers of the run write there, which a Trainer starts first.

    Raises:
        FolderTakenError: if it may not.
    """
    summary, ours = summary_or_none(folder), {LOCK, *also}
    if begun or (folder.path / LOCK).is_file():  # by a run that ended before its summary
        ours |= {HYDRA, RUN_YAML, log}
    if summary is None:  # and what a kill has left of the first one
        ours.update(path.name for path in folder.path.glob(f".{folder.summary.name}.tmp-*"))
        found = sorted(set(os.listdir(folder.path)) - ours) if folder.path.exists() else []
    elif summary.status == "completed" or summary.stage != stage:
        found = [f"a run ({summary.stage}, {summary.status})"]
    else:
        found = sorted(path.name for path in folder.checkpoints.glob("iteration=*.ckpt"))
    if found:
        ways = f"resume=auto, ckpt_path={folder.last_checkpoint}, or choose another folder"
        raise FolderTakenError(f"{folder.path} holds {found[-1]}: {ways} (hydra.run.dir=)")


def drop_leftovers(folder: RunFolder) -> None:
    """Remove what pages show of a run that ended here before its first checkpoint.

    Args:
        folder: folder that is free, and claimed for a new run.
    """
    written = (folder.metrics, folder.samples, folder.distributions, folder.doctor)
    for file in (*written, folder.report, folder.traceback):
        file.unlink(missing_ok=True)


def drop_unused(folder: RunFolder, instead: RunFolder, log: str, *, link: bool = False) -> None:
    """Remove a folder that has nothing but Hydra's files and ours, whose run continues in another.

    Args:
        folder: folder that the command has taken.
        instead: folder in which the run continues.
        log: name of Hydra's log.
        link: leave a link to it, for a sweep that counts the runs in its folder.
    """
    if is_unused(folder.path, log):
        shutil.rmtree(folder.path)
    if link and not folder.path.exists():
        folder.path.symlink_to(os.path.relpath(instead.path, folder.path.parent))


def drop_refused(*also: str) -> None:
    """Remove what this process has made for a run that did nothing: its folder, empty ones above.

    A folder that was there before stays, as does one with other files than Hydra's and ours.

    Args:
        also: names of what was written besides, such as Hydra's log.
    """
    for folder, made in _made.items():
        if made and is_unused(folder, *also):
            shutil.rmtree(folder, ignore_errors=True)  # other ranks may write there
            for above in made[1:]:
                with suppress(OSError):  # it is not empty
                    above.rmdir()


def is_unused(folder: Path, *also: str) -> bool:
    """Return whether a folder has nothing but Hydra's files, ours and those with these names."""
    return folder.is_dir() and set(os.listdir(folder)) <= {LOCK, HYDRA, RUN_YAML, *also}


def _acquire(path: Path, *, blocking: bool = False) -> int | None:
    """Return the descriptor of a lock that is ours now, None if another process holds it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    if lock_descriptor(lock, blocking=blocking):
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        _held.add(lock)
        return lock
    os.close(lock)
    return None


def _release(lock: int) -> None:
    _held.discard(lock)
    unlock_descriptor(lock)
    os.close(lock)


def _drop_inherited() -> None:
    """Leave the locks to the parent: a data loader or a pool may outlive it, if it is killed."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_drop_inherited)


def _holder(path: Path) -> str:
    return path.read_text().strip() or "another process"


def check_replaceable(folder: Path | str, *, ours: bool = False, key: str = "") -> None:
    """Check that a folder may be replaced: it does not exist, is empty, or is ours.

    Args:
        folder: folder to replace.
        ours: whether the place is known to be ours, as one inside a run folder is.
        key: configuration key that names it, for the message.

    Raises:
        FolderTakenError: if it may not; nothing is written here.
    """
    folder = Path(folder).expanduser()
    if folder.is_dir() and (ours or (folder / WRITTEN).is_file() or not any(folder.iterdir())):
        return
    if folder.exists():
        raise FolderTakenError(f"{key}{folder} is there already: give another folder")


@contextmanager
def replacing_folder(folder: Path | str, *, ours: bool = False) -> Iterator[Path]:
    """Yield the path of a new folder that replaces `folder` once the block has ended.

    On Linux both names are exchanged in one system call; elsewhere there is a moment without the
    folder. Files that somebody has added to the former folder are kept.

    Args:
        folder: folder to replace; links are followed.
        ours: whether the place is known to be ours.

    Raises:
        FolderTakenError: as `check_replaceable`, or if a new file has the name of an added one.
    """
    folder = Path(folder).expanduser().resolve()
    check_replaceable(folder, ours=ours)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f".{folder.name}.tmp-new")
    shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
    try:
        yield staging
        new = sorted(_files(staging) - {WRITTEN})
        _keep_added(folder, staging)
        write_text(staging / WRITTEN, json.dumps(new) + "\n")
        _replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _files(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {str(path.relative_to(folder)) for path in found}


def _keep_added(former: Path, staging: Path) -> None:
    """Copy the files of a folder that we have not written there into the one that replaces it."""
    there = _files(former) if former.exists() else set()
    written = {name for name in there if ".safetensors" in name} | _files(staging)
    if WRITTEN in there:
        written = {WRITTEN, *json.loads((former / WRITTEN).read_text())}
    for name in there - written:
        if os.path.lexists(staging / name):
            raise FolderTakenError(f"{former / name} is in the way of a new file: move it away")
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(former / name, staging / name, follow_symlinks=False)


def _replace(staging: Path, folder: Path) -> None:
    """Put `staging` at `folder`; what was there is at `staging` then."""
    if folder.exists() and not _exchange(staging, folder):
        aside = folder.with_name(f".{folder.name}.tmp-old")
        folder.rename(aside)
        staging.rename(folder)
        aside.rename(staging)
    elif staging.exists() and not folder.exists():
        staging.rename(folder)
    sync_folder(folder.parent)


def _exchange(first: Path, second: Path) -> bool:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    return bool(rename(*names, ctypes.c_uint(_RENAME_EXCHANGE)) == 0)
