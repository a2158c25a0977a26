"""The check that a folder is free for a new run: a run folder is its own."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from rlhf_lightning.runs.atomic import link_atomically
from rlhf_lightning.runs.folder import RESOLVED, RunFolder
from rlhf_lightning.runs.lock import LOCK, FolderTakenError, is_signed
from rlhf_lightning.runs.resume import newest_complete_in
from rlhf_lightning.runs.summary import Summary, read_summary

HYDRA = ".hydra"  # and in it what Hydra writes
_SAVED = ("config.yaml", "hydra.yaml", "overrides.yaml", RESOLVED)


ELSEWHERE = "choose another folder (hydra.run.dir=, in Python that of trainer_arguments)"


def check_free(
    folder: RunFolder,
    stage: str,
    *,
    log: str = "",
    begun: bool = False,
    loggers: Collection[str] = (),
) -> None:
    """Check that a new run may write into a folder; nothing is written here.

    It may if the folder is missing or empty, or belongs to a run of the same kind that ended before
    its first checkpoint: nothing in it can be lost. Foreign files are never touched.

    Args:
        folder: folder of the run.
        stage: stage of the run.
        log: name of Hydra's log, which a run has written before its summary.
        begun: whether Hydra may have written there by now, as in the folder of a sweep's job.
        loggers: names of what loggers of the run write there, which a Trainer starts first.

    Raises:
        FolderTakenError: if it may not.
    """
    go_on = f"continue it with ckpt_path={folder.last_checkpoint} (or resume=auto), or {ELSEWHERE}"
    if folder.summary.exists():
        try:
            summary = read_summary(folder)
        except (OSError, ValueError) as error:
            raise FolderTakenError(f"{folder.path} is not free: {error}; or {ELSEWHERE}") from error
        if summary.status == "completed" or summary.stage != stage:
            ended = "a finished" if summary.status == "completed" else "an unfinished"
            raise FolderTakenError(
                f"the folder {folder.path} holds {ended} run ({summary.stage}), which would be "
                f"overwritten: {go_on if summary.stage == stage else ELSEWHERE}"
            )
    if (found := newest_complete_in(folder.checkpoints)) is not None:
        raise FolderTakenError(
            f"the folder {folder.path} holds the checkpoints of another run, e.g. {found.name}: "
            f"{go_on}"
        )
    if folder.summary.exists():
        return
    ours = {LOCK, *loggers} | ({HYDRA, log} if begun or is_signed(folder.path) else set())
    if others := sorted(entry.name for entry in _entries(folder.path) if entry.name not in ours):
        raise FolderTakenError(
            f"the folder {folder.path} holds {others[0]}"
            + (f" and {len(others) - 1} more" if others[1:] else "")
            + f", which no run has written there: {ELSEWHERE}"
        )


def check_no_links(folder: RunFolder, log: str) -> None:
    """Check that what Hydra writes into a run folder before the run begins stays in it.

    Raises:
        FolderTakenError: if its log or its folder is a link, a pipe or something else.
    """
    for path, is_it in ((folder.path / HYDRA, Path.is_dir), (folder.path / log, Path.is_file)):
        if path != folder.path and (path.is_symlink() or (path.exists() and not is_it(path))):
            raise FolderTakenError(
                f"{path} is a link, or not what a run writes there: remove it, or {ELSEWHERE}"
            )


def check_free_sweep(folder: Path) -> None:
    """Check that a new sweep may write into a folder: it is not there, or empty.

    Raises:
        FolderTakenError: if it is not empty.
    """
    found = sorted(entry.name for entry in _entries(folder) if entry.name != LOCK)
    if found:
        what = "the runs of another sweep" if list(folder.glob("*/summary.json")) else "files"
        raise FolderTakenError(
            f"the folder {folder} holds {what}, e.g. {found[0]}: "
            "choose another folder with hydra.sweep.dir="
        )


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    if folder.exists():
        with os.scandir(folder) as found:
            yield from found


def drop_unused(folder: RunFolder, instead: RunFolder, log: str, *, link: bool = False) -> None:
    """Remove what Hydra and the claim wrote in a folder whose run continues in another.

    Args:
        folder: removed as well, unless it has other files.
        instead: folder in which the run continues.
        log: name of Hydra's log.
        link: leave a link to it, for a sweep that counts the runs in its folder.
    """
    if folder.summary.exists() or folder.path.resolve() == instead.path.resolve():
        return
    hydra = folder.path / HYDRA
    for made in (*(hydra / name for name in _SAVED), folder.path / LOCK, folder.path / log):
        made.unlink(missing_ok=True)
    for emptied in (hydra, folder.path):
        with suppress(OSError):  # it is not empty, or not there
            emptied.rmdir()
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
