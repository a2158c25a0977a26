"""Folders that take the place of an earlier one in one step, without a loss for anybody else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_lightning.runs.atomic import (
    link_or_copy,
    naming_full_disk,
    replace_folder,
    staging_of,
    write_text,
)
from rlhf_lightning.runs.lock import FolderTakenError
from rlhf_lightning.runs.reading import read_json

WRITTEN = ".written.json"  # the files that were written into a folder, by us
# What a folder of ours has that was made before there was such a list, with a key of it.
_OURS = {"manifest.json": "fingerprint", "reliability.json": "records"}
_WEIGHTS = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


def check_replaceable(folder: Path | str, *, ours: bool = False, key: str = "") -> None:
    """Check that a folder may be replaced: it does not exist, is empty, or is ours.

    Args:
        folder: folder to replace.
        ours: whether the place is known to be ours.
        key: configuration key that names it, for the message.

    Raises:
        FolderTakenError: if it may not; nothing is written here.
    """
    folder = Path(folder).expanduser()
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not above.is_dir():
        raise FolderTakenError(f"{key}{folder} is below {above}, a file: give another folder")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder.is_dir() and (ours or _is_made_here(folder))):
        raise FolderTakenError(
            f"{key}{folder} is there already, and nothing of it was written by us: give another "
            "folder, or move it away"
        )
    if not ours and (folder.parent / "summary.json").is_file():
        raise FolderTakenError(
            f"{key}{folder} belongs to the run in {folder.parent}: give another folder"
        )


@contextmanager
def replacing_folder(folder: Path | str, *, ours: bool = False) -> Iterator[Path]:
    """Yield the path of a new folder that replaces `folder` once the block has ended.

    Foreign files in the former folder are kept. Leftovers of a killed process are removed.

    Args:
        folder: folder to replace; links are followed.
        ours: whether the place is known to be ours, as one inside a run folder is.

    Raises:
        FolderTakenError: as `check_replaceable`.
        DiskFullError: if there is no room; `folder` is then unchanged.
    """
    folder = Path(folder).expanduser().resolve()
    check_replaceable(folder, ours=ours)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = staging_of(folder)
    former: Path | None = None
    try:
        with naming_full_disk(folder):
            yield staging
            (staging / WRITTEN).unlink(missing_ok=True)  # of what was copied
            write_text(staging / WRITTEN, json.dumps(_files(staging)) + "\n")
            for name in _of_others(folder, set(_files(staging))):
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                if (folder / name).is_symlink():
                    (staging / name).symlink_to((folder / name).readlink())
                else:
                    link_or_copy(folder / name, staging / name)
            if folder.exists():
                shutil.copymode(folder, staging)
            former = replace_folder(staging, folder)
    finally:
        shutil.rmtree(former or staging, ignore_errors=True)


def _files(folder: Path) -> list[str]:
    found = (p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())
    return sorted(str(path.relative_to(folder)) for path in found)


def _of_others(folder: Path, new: set[str]) -> list[str]:
    """Return the files in a folder that we have not written there, by name.

    Raises:
        FolderTakenError: if one of them has the name of a new file.
    """
    there, written = set(_files(folder)), _json(folder / WRITTEN)
    if not isinstance(written, list):
        weights = {name for name in there if _WEIGHTS.fullmatch(Path(name).name)}
        return sorted(there - weights - new - set(_OURS))
    theirs = there - {*written, WRITTEN}
    if taken := sorted(theirs & new):
        raise FolderTakenError(
            f"{folder / taken[0]} was not written by us, and a new file of that name would take "
            "its place: move it away"
        )
    return sorted(theirs)


def _is_made_here(folder: Path) -> bool:
    if isinstance(_json(folder / WRITTEN), list):
        return True
    known = ((key, _json(folder / name)) for name, key in _OURS.items())
    return any(isinstance(content, dict) and key in content for key, content in known)


def _json(file: Path) -> Any:
    """Return the content of a file, None where there is none that can be read."""
    try:
        return read_json(file)
    except (OSError, ValueError):
        return None
