"""Folders that take the place of an earlier one in one step, and never of somebody else's."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_lightning.runs.atomic import sync_folder, write_text
from rlhf_lightning.runs.lock import FolderTakenError

WRITTEN = ".written.json"  # in a folder that we replace: the files that we have written there
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


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
        raise FolderTakenError(
            f"{key}{folder} is there already, and nothing of it was written by us: give another "
            "folder, or move it away"
        )


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
            raise FolderTakenError(
                f"{former / name} was not written by us, and a new file of that name would take "
                "its place: move it away"
            )
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
