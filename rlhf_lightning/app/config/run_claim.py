"""The claim of a run on its folder, before Hydra or we write there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_lightning.app.command_line import fail
from rlhf_lightning.app.config.commands import CollectSettings, PipelineSettings, StudySettings
from rlhf_lightning.app.config.compose import ConfigError, describe_interpolation
from rlhf_lightning.app.config.inherit import command_settings
from rlhf_lightning.app.config.settings import RunSettings, TrainSettings
from rlhf_lightning.app.sweep import in_sweep
from rlhf_lightning.distributed.launch import broadcast_from_rank0, global_rank, started_by_others
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import FolderTakenError, take_run
from rlhf_lightning.runs.replaced import check_replaceable
from rlhf_lightning.runs.resume import unfinished_runs
from rlhf_lightning.runs.taken import (
    HYDRA,
    check_free,
    check_free_sweep,
    check_no_links,
    summary_or_none,
)

_FOLDER = "${hydra.runtime.output_dir}"  # of a run, as Hydra's settings write it
_PUBLISHING = ("artifacts.publish", "paths.publish")
_NUMBER = re.compile(r"\$\{hydra\.job\.(num|id)\}")


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
            folder = Path(str(hydra[kind].dir))
            _check_where_hydra_writes(hydra)
            check = partial(check_free_sweep, folder)
            if kind == "run":
                words = list(hydra.overrides.task)
                settings = command_settings(
                    str(hydra.job.config_name), config, words, trains_first=True
                )
                check = partial(check_folder, settings, RunFolder(folder))
        except ConfigError as error:
            fail(str(error))
        except OmegaConfBaseException as error:  # of the folder's name
            fail(describe_interpolation(error))
        _or_fail(f"hydra.{kind}.dir", folder, check)


def check_folder(settings: RunSettings, folder: RunFolder) -> None:
    """Check that a run with these settings may write into a folder, and where it publishes.

    Raises:
        FolderTakenError: if another run is complete there or could be continued, or if the folder
            has foreign files.
    """
    check_no_links(folder, hydra_log())
    if not continues(settings, folder):
        begun = in_sweep() or not HydraConfig.initialized()
        check_free(folder, settings.kind, log=hydra_log(), begun=begun)
    target = settings.select("artifacts.publish")
    if target is not None and settings.paths.publish:
        check_replaceable(target, key="artifacts.publish=")


def hydra_log() -> str:
    """Return the name of the log that Hydra keeps in a run folder."""
    return f"{HydraConfig.get().job.name}.log" if HydraConfig.initialized() else ""


def _check_where_hydra_writes(hydra: Any) -> None:
    """Check that Hydra writes into folders of runs alone.

    Raises:
        ConfigError: if a setting of its leads elsewhere.
    """
    if hydra.output_subdir not in (HYDRA, None):
        raise ConfigError(
            f"hydra.output_subdir={hydra.output_subdir} would put the configuration where no "
            "command finds it: leave it out"
        )
    written = OmegaConf.to_container(hydra, resolve=False)
    assert isinstance(written, dict)
    subdir, words = str(written["sweep"]["subdir"]), str(written["job"].get("override_dirname"))
    if not _is_inside(subdir.replace("${hydra.job.override_dirname}", words)):
        raise ConfigError(
            f"hydra.sweep.subdir={subdir} is no folder inside that of the sweep: give each job a "
            "different one, such as ${hydra.job.num}"
        )
    for group in ("job_logging", "hydra_logging"):
        for name, handler in ((written[group] or {}).get("handlers") or {}).items():
            file = handler.get("filename", _FOLDER + "/x")
            inside = file.replace("${hydra.job.name}", str(written["job"]["name"]))
            if not (inside.startswith(_FOLDER) and _is_inside(inside.removeprefix(_FOLDER)[1:])):
                raise ConfigError(
                    f"hydra.{group}.handlers.{name}.filename={inside} is no file of the run "
                    "folder: leave it out, and hydra.job.name="
                )


def _is_inside(path: str) -> bool:
    """Return whether a path, as written, stays in its folder whatever other settings say."""
    plain = _NUMBER.sub("0", path)
    parts = Path(plain).parts
    return bool(parts) and not ("$" in plain or ".." in parts or Path(plain).is_absolute())


def continues(settings: RunSettings, folder: RunFolder) -> bool:
    """Return whether a run continues the run in its folder.

    That is so with a checkpoint of the folder itself, with `resume=auto` where the folder's run is
    an unfinished one of the same settings, and in the folder of a study.
    """
    if isinstance(settings, TrainSettings) and settings.ckpt_path is not None:
        return folder.checkpoints.resolve() == Path(settings.ckpt_path).absolute().parent.resolve()
    summary = summary_or_none(folder)
    if isinstance(settings, StudySettings):  # a folder holds the runs of all its matrices
        return summary is not None and settings.kind == summary.stage
    if getattr(settings, "resume", "never") != "auto" or summary is None:
        return False
    if summary.config_hash != settings.config_hash:
        return False
    if isinstance(settings, PipelineSettings):  # a complete one may get more rounds
        rounds = map(int, re.findall(r"round_(\d+)/", summary.about.get("stages", "")))
        return summary.status != "completed" or max(rounds, default=0) < settings.rounds
    return summary.status != "completed"


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
    outputs, digest = Path(settings.paths.outputs), settings.config_hash
    if not in_sweep():
        yield from unfinished_runs(outputs / settings.name, digest)
    yield from unfinished_runs(outputs / "multirun", digest, pattern="*/*")


def _or_fail(key: str, folder: Path, check: Callable[[], None]) -> None:
    if global_rank() and not started_by_others():
        return  # Lightning has started it for a run that has its folder, such as a sweep's job

    def taken() -> str:
        take_run(folder, check)
        return str(folder)

    try:
        broadcast_from_rank0("free folder", taken)
    except FolderTakenError as error:
        fail(str(error))
    except OSError as error:
        reason = error.strerror or str(error)
        fail(
            f"{key}={folder} cannot be written ({reason}: {error.filename}): give a folder that "
            "can, with it or with paths.outputs="
        )
    except RuntimeError as error:  # of the first rank
        fail(str(error))
