"""Checks that a folder is free for a new run."""

from __future__ import annotations

import shutil
from pathlib import Path

from rlhf_lightning.runs.atomic import link_atomically
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import FolderTakenError
from rlhf_lightning.runs.resume import newest_complete_checkpoint
from rlhf_lightning.runs.summary import Summary, read_summary

ELSE = "choose another folder with hydra.run.dir="


def check_free(folder: RunFolder, stage: str, *, continues: bool = False) -> None:
    """Check that a run may write into a folder; nothing is written here.

    A folder whose run ended before its first checkpoint is free: there is nothing to lose in it.

    Args:
        folder: that of the run.
        stage: of the run.
        continues: whether the run goes on with what is there.

    Raises:
        FolderTakenError: if another run is complete there, or could be continued.
    """
    if continues:
        return
    if folder.summary.exists():
        try:
            summary = read_summary(folder)
        except (OSError, ValueError) as error:
            raise FolderTakenError(f"{folder.path} is not free: {error}; or {ELSE}") from error
        if summary.status == "completed" or summary.stage != stage:
            ended = "a finished" if summary.status == "completed" else "an unfinished"
            raise FolderTakenError(
                f"the folder {folder.path} holds {ended} run ({summary.stage}), which would be "
                f"overwritten: {ELSE}"
            )
    checkpoint = newest_complete_checkpoint(folder)
    if checkpoint is not None:
        raise FolderTakenError(
            f"the folder {folder.path} holds the checkpoints of another run, e.g. "
            f"{checkpoint.name}: continue it with ckpt_path={folder.last_checkpoint} (with "
            f"resume=auto if it is of this configuration), or {ELSE}"
        )


def check_free_sweep(folder: Path) -> None:
    """Check that no run of another sweep stands in a sweep's folder.

    Raises:
        FolderTakenError: if there is one.
    """
    found = sorted(folder.glob("*/summary.json"))
    if found:
        raise FolderTakenError(
            f"the folder {folder} holds the runs of another sweep, e.g. {found[0].parent.name}: "
            "choose another folder with hydra.sweep.dir="
        )


def drop_unused(folder: RunFolder, instead: RunFolder, *, link: bool = False) -> None:
    """Remove a folder that holds nothing but what Hydra made; the run goes on in another.

    Args:
        folder: to remove.
        instead: the other one.
        link: leave a link to it, for a sweep that counts the runs in its folder.
    """
    own = folder.path.resolve() == instead.path.resolve()
    if not own and all(
        p.name in (".hydra", ".lock") or p.suffix == ".log" for p in folder.path.glob("*")
    ):
        shutil.rmtree(folder.path, ignore_errors=True)
        if link and not folder.path.exists():
            link_atomically(folder.path, instead.path)


def spent_seconds(folder: RunFolder) -> float:
    """Return the seconds of a run so far; those of a process that was killed are not known."""
    summary = summary_or_none(folder)
    return 0.0 if summary is None else summary.seconds.get("total", 0.0)


def summary_or_none(folder: RunFolder) -> Summary | None:
    """Return the summary of a run, None where there is none that can be read."""
    try:
        return read_summary(folder)
    except (OSError, ValueError):
        return None
