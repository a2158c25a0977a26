"""The start and the end that all commands share.

A mistake is answered in one line, at once, and before Hydra makes a folder for the run.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from rlhf_lightning.app.config.compose import ConfigError, composed, conf_dir
from rlhf_lightning.app.config.errors import COMPOSE_ERRORS, explain
from rlhf_lightning.app.config.inherit import command_settings
from rlhf_lightning.distributed.launch import end_process
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.secrets import redacted

MISTAKE = 2  # exit status


def fail(message: str, status: int = MISTAKE) -> NoReturn:
    """Write `message` without its secrets as an error, and end the process."""
    sys.stderr.write(f"error: {redacted(message)}\n")
    raise SystemExit(status)


def say(text: str) -> None:
    """Write a line that is seen at once, into a file or pipe too."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def check_command_line(entry: str) -> Any:
    """Return the settings that the command line composes; end the process if it is a mistake.

    Args:
        entry: the command, and its file in `conf/`.

    Returns:
        The settings; None for a sweep, which checks each of its jobs, and where flags are given,
        which are Hydra's to read.
    """
    overrides = sys.argv[1:]
    if any(argument.startswith("-") for argument in overrides):
        return None
    try:
        cfg = composed(entry, overrides)
        if cfg.hydra.mode == RunMode.MULTIRUN:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself will warn
            return command_settings(entry, cfg, overrides)
    except ConfigError as error:
        fail(str(error))
    except COMPOSE_ERRORS as error:
        fail(explain(error, overrides, entry))


def run_job(entry: str, job: Callable[[Any], object]) -> None:
    """Have Hydra compose the command line and call `job`; then end this process in order.

    Args:
        entry: the command, and its file in `conf/`.
        job: called with the composed configuration, once for each job of a sweep.
    """
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=entry)(job)()
    end_process()


class Job(NamedTuple):
    """A job that Hydra runs: its folder, its overrides, and whether it is one of a sweep."""

    folder: RunFolder
    overrides: list[str]
    in_sweep: bool


def this_job() -> Job:
    """Return the job that Hydra runs."""
    config = HydraConfig.get()
    folder = RunFolder(Path(config.runtime.output_dir))
    return Job(folder, list(config.overrides.task), config.mode == RunMode.MULTIRUN)


def quieten() -> None:
    """Silence it; imports transformers."""
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*have no `validation_step`.*")
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of loading and saving a few megabytes
