"""Folders that take the place of an earlier one in one step, without a loss for anybody else."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf_lightning.runs.atomic import (
    link_or_copy,
    naming_full_disk,
    replace_folder,
    write_text,
)
from rlhf_lightning.runs.lock import FolderTakenError

WRITTEN = ".written.json"  # the files that were written into a folder, by us
# What a folder of ours has that was made before there was such a list.
_OURS = ("manifest.json", "reliability.json")
_WEIGHTS = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


def check_replaceable(folder: Path | str, *, ours: bool = False, key: str = "") -> None:
    """Check that a folder may be replaced: it is not there, is empty, or we have made it.

    Args:
        folder: to replace.
        ours: whether its place is known to be ours.
        key: that names it, for the message.

    Raises:
        FolderTakenError: if it may not; nothing is written here.
    """
    folder = Path(folder).expanduser()
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    made = ours or any((folder / name).is_file() for name in (WRITTEN, *_OURS))
    if not (folder.is_dir() and made):
        raise FolderTakenError(
            f"{key}{folder} is there already, and nothing of it was written by us: give another "
            "folder, or move it away"
        )


@contextmanager
def replacing_folder(folder: Path | str, *, ours: bool = False) -> Iterator[Path]:
    """Yield the path of a new folder that takes the place of `folder` once the block has ended.

    What somebody else has put into the former one is taken along. What a process that was killed
    here had begun is removed.

    Args:
        folder: links are followed.
        ours: whether the place is known to be ours, as one inside a run folder is.

    Raises:
        FolderTakenError: as `check_replaceable`.
        DiskFullError: if there is no room; `folder` is then what it was.
    """
    folder = Path(folder).expanduser().resolve()
    check_replaceable(folder, ours=ours)
    folder.parent.mkdir(parents=True, exist_ok=True)
    host = socket.gethostname()
    _remove_abandoned(folder, host)
    staging = folder.with_name(f".{folder.name}.tmp-{host}-{os.getpid()}")
    former: Path | None = None
    try:
        with naming_full_disk(folder):
            yield staging
            (staging / WRITTEN).unlink(missing_ok=True)  # of what was copied
            write_text(staging / WRITTEN, json.dumps(_files(staging)) + "\n")
            for name in _of_others(folder, _files(staging)):
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                if (folder / name).is_symlink():
                    (staging / name).symlink_to((folder / name).readlink())
                else:
                    link_or_copy(folder / name, staging / name)
            former = replace_folder(staging, folder)
    finally:
        shutil.rmtree(former or staging, ignore_errors=True)


def _files(folder: Path) -> list[str]:
    found = (p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())
    return sorted(str(path.relative_to(folder)) for path in found)


def _of_others(folder: Path, new: list[str]) -> list[str]:
    """Return the files in a folder that we have not written there, by name."""
    try:
        written = set(json.loads((folder / WRITTEN).read_text("utf-8")))
    except (OSError, ValueError):
        written = {name for name in _files(folder) if _WEIGHTS.fullmatch(Path(name).name)}
    return sorted(set(_files(folder)) - written - {*new, WRITTEN, *_OURS})


def _remove_abandoned(folder: Path, host: str) -> None:
    """Remove what processes that are no more have begun beside a folder, on this machine."""
    name = re.compile(rf"\.{re.escape(folder.name)}\.tmp-({re.escape(host)}-)?(\d+)")
    for path in folder.parent.iterdir():
        if (found := name.fullmatch(path.name)) and not _is_alive(int(found[2])):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(process: int) -> bool:
    if process == os.getpid():  # what has its number is of an earlier process
        return False
    with suppress(ProcessLookupError):
        with suppress(PermissionError):
            os.kill(process, 0)
        return True
    return False
