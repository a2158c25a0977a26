"""The claim of a run on its folder, before Hydra or we write there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback

from rlhf_lightning.app.config.commands import CollectSettings, PipelineSettings
from rlhf_lightning.app.config.compose import ConfigError, hydra_folder
from rlhf_lightning.app.config.inherit import command_settings
from rlhf_lightning.app.config.settings import RunSettings, TrainSettings
from rlhf_lightning.app.failures import REFUSALS, record_failure
from rlhf_lightning.app.start import fail
from rlhf_lightning.app.sweep import in_sweep
from rlhf_lightning.distributed.launch import broadcast_from_rank0, global_rank, started_by_others
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import (
    LOCK,
    FolderTakenError,
    check_free,
    check_replaceable,
    is_unused,
    take_run,
)
from rlhf_lightning.runs.resume import runs_of
from rlhf_lightning.runs.summary import Summary, summary_or_none

_PUBLISHING = ("artifacts.publish", "paths.publish")


class ClaimFolder(Callback):
    """Refuse a folder that is not free, in one line, before Hydra writes `.hydra` or a log.

    The first rank looks; the others wait for it.
    """

    def on_run_start(self, config: Any, **kwargs: Any) -> None:
        """Take the folder of a single run."""
        self._take(config, "run")

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        """Take the folder of a sweep, for as long as it lasts.

        Its jobs publish nothing, unless it says where or that they do: each would replace what the
        one before it has made, and the next stage start from the last one.
        """
        given = [*config.hydra.overrides.task, *(config.hydra.sweeper.get("params") or {})]
        named = any(word.lstrip("+").startswith(_PUBLISHING) for word in given)
        if "publish" in config.get("artifacts", {}) and not named:
            config.hydra.overrides.task.append("paths.publish=false")
        self._take(config, "sweep")

    def _take(self, config: Any, kind: str) -> None:
        HydraConfig.instance().set_config(config)  # the folder's name may refer to it
        hydra = config.hydra
        try:
            folder = hydra_folder(hydra, kind)
            check = partial(_check_free_sweep, folder)
            if kind == "run":
                entry, words = str(hydra.job.config_name), list(hydra.overrides.task)
                settings = command_settings(entry, config, words)
                check = partial(check_folder, settings, RunFolder(folder))
        except ConfigError as error:
            fail(str(error))
        if global_rank() and not started_by_others():
            return  # Lightning has started it for a run that has its folder, such as a sweep's job

        def taken() -> str:
            take_run(folder, check)
            return str(folder)

        try:
            broadcast_from_rank0("free folder", taken)
        except RuntimeError as error:  # of the first rank
            fail(str(error))
        except OSError as error:
            fail(f"hydra.{kind}.dir={folder}: {error}")


def check_folder(settings: RunSettings, folder: RunFolder) -> None:
    """Check that a run with these settings may write into a folder, and where it publishes.

    Raises:
        FolderTakenError: if another run is complete there or could be continued, or if the folder
            has foreign files.
    """
    if not continues(settings, folder):
        begun = in_sweep() or not HydraConfig.initialized()
        check_free(folder, settings.stage, log=hydra_log(), begun=begun)
    target = settings.select("artifacts.publish")
    if target is not None and settings.paths.publish:
        check_replaceable(target, key="artifacts.publish=")


def _check_free_sweep(folder: Path) -> None:
    found = sorted(set(os.listdir(folder)) - {LOCK}) if folder.exists() else []
    if found:
        told = f"the folder {folder} is not empty, it holds e.g. {found[0]}"
        raise FolderTakenError(f"{told}: choose another one with hydra.sweep.dir=")


def record_end(
    folder: RunFolder, summary: Summary, error: BaseException, *, resumes: bool = True
) -> None:
    """Record how a run failed; of one that was refused before it did anything nothing is kept."""
    is_new = is_unused(folder.path, hydra_log(), folder.summary.name, folder.wandb.name)
    if isinstance(error, REFUSALS) and is_new:
        folder.summary.unlink()
    else:
        record_failure(folder, summary, error, resumes=resumes)


def hydra_log() -> str:
    """Return the name of the log that Hydra keeps in a run folder."""
    return f"{HydraConfig.get().job.name}.log" if HydraConfig.initialized() else ""


def continues(settings: RunSettings, folder: RunFolder) -> bool:
    """Return whether a run continues the run in its folder.

    That is so with a checkpoint of the folder itself, with `resume=auto` where the folder's run is
    an unfinished one of the same settings.
    """
    if isinstance(settings, TrainSettings) and settings.ckpt_path is not None:
        return folder.checkpoints.resolve() == Path(settings.ckpt_path).absolute().parent.resolve()
    summary = summary_or_none(folder)
    if getattr(settings, "resume", "never") != "auto" or summary is None:
        return False
    more = False
    if isinstance(settings, PipelineSettings):  # a complete one may get more rounds
        rounds = map(int, re.findall(r"round_(\d+)/", summary.about.get("stages", "")))
        more = max(rounds, default=0) < settings.rounds
    same = summary.config_hash == settings.config_hash
    return same and (more or summary.status != "completed")


def runs_to_continue(
    settings: TrainSettings | CollectSettings, folder: RunFolder
) -> Iterator[RunFolder]:
    """Yield the unfinished runs of these settings, for `resume=auto`.

    That in the command's own folder comes first (`hydra.run.dir=`), then the newest. A job of a
    sweep continues one of an earlier sweep, a single run a single one or, if there is none, a job
    of a sweep.
    """
    if continues(settings, folder):
        yield folder
    yield from _runs_of(settings)


def _runs_of(
    settings: TrainSettings | CollectSettings, *, completed: bool = False
) -> Iterator[RunFolder]:
    outputs, digest = Path(settings.paths.outputs), settings.config_hash
    if not in_sweep():
        yield from runs_of(outputs / settings.name, digest, completed=completed)
    yield from runs_of(outputs / "multirun", digest, pattern="*/*", completed=completed)


def nothing_to_continue(settings: TrainSettings | CollectSettings) -> str | None:
    """Return why `resume=auto` continues nothing, and how a run that is complete is made longer."""
    if settings.resume != "auto":
        return None
    done = next(_runs_of(settings, completed=True), None)
    if done is None:
        return f"nothing: {settings.paths.outputs} has no run of this configuration to continue"
    told = f"nothing: the newest run of this configuration is complete, {done.path}"
    if isinstance(settings, TrainSettings):
        longer = f"ckpt_path={done.last_checkpoint} and a larger {settings.length_key}"
        told += f"; for a longer one give {longer}"
    return told
