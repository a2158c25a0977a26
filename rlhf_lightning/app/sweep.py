"""Sweeps: a job that fails does not stop one, and one page compares its jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode

from rlhf_lightning.app.config.saved import saved_words
from rlhf_lightning.app.failures import record_failure
from rlhf_lightning.distributed.launch import RANK_VARIABLES, global_rank
from rlhf_lightning.reports.compare import write_comparison
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import FolderTakenError
from rlhf_lightning.runs.summary import new_summary, read_summary


def in_sweep() -> bool:
    """Return whether this run is a job of a multirun."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def should_continue(
    folder: RunFolder,
    error: BaseException,
    *,
    kind: str,
    seed: int,
    environment: Mapping[str, str] = os.environ,
) -> bool:
    """Record a failed job for the page, and return whether the sweep continues.

    It stops after an interrupt, and where ranks share a job: after a failure they are out of step.
    `launcher=slurm` and `launcher=local` start each job by itself.

    Args:
        folder: folder of the job.
        error: error that ended it.
        kind: kind of its run, in summaries.
        seed: seed of its run.
        environment: environment variables, which show whether ranks share the job.
    """
    if not (in_sweep() and isinstance(error, Exception)):
        return False
    first = global_rank(environment) == 0
    mine = not isinstance(error, FolderTakenError)
    if first and mine and not folder.summary.is_file():  # its configuration was refused
        begun = new_summary(kind, seed=seed, config_hash=None)
        record_failure(folder.create(), begun, error)
    return not any(name in environment for name in RANK_VARIABLES)


class SweepEnd(Callback):
    """Hydra callback in the process that started the sweep, wherever its jobs ran.

    Attributes:
        folder: of the sweep that this process has begun and not finished; None without one.
    """

    folder: ClassVar[Path | None] = None

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        """Keep the folder."""
        SweepEnd.folder = Path(config.hydra.sweep.dir)

    def on_multirun_end(self, config: Any, **kwargs: Any) -> None:
        """Write comparison.html, name the jobs that failed, and leave with 1 if there are any."""
        self.finish()

    @classmethod
    def finish(cls) -> None:
        """Do that where it is not done yet.

        Raises:
            SystemExit: if a job failed.
        """
        folder, cls.folder = cls.folder, None
        if folder is not None and global_rank() == 0:
            finish_sweep(folder)


def finish_sweep(sweep: Path) -> None:
    """Write `comparison.html` of the jobs in a folder, and leave with 1 if one did not end.

    Raises:
        SystemExit: then.
    """
    jobs = {path.parent.parent for path in sweep.glob("*/.hydra/config.yaml")}
    runs = [RunFolder(job) for job in sorted(jobs, key=lambda path: (len(path.name), path.name))]
    begun = [run for run in runs if run.summary.is_file()]
    if len(begun) > 1:
        page = write_comparison(begun, sweep / "comparison.html")
        sys.stdout.write(f"comparison of the {len(begun)} jobs: {page}\n")
    failed = [(run, why) for run in runs if (why := _failure(run)) is not None]
    if not failed:
        return
    lines = [f"  {run.name}  {' '.join(saved_words(run))}: {why}\n" for run, why in failed]
    sys.stderr.write(f"{len(failed)} of {len(runs)} jobs failed:\n{''.join(lines)}")
    raise SystemExit(1)


def _failure(run: RunFolder) -> str | None:
    """Return why a job has not ended, None if it has."""
    if not run.summary.is_file():
        return "it has not begun"
    summary = read_summary(run)
    return None if summary.status == "completed" else summary.cause or summary.status
