"""The start and the end that all commands share: settings, help and errors.

A mistake is answered in one line, at once, and before Hydra makes a folder for the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig

from rlhf_lightning.app.config.commands import COMMANDS
from rlhf_lightning.app.config.compose import conf_dir, register
from rlhf_lightning.app.config.inherit import command_settings
from rlhf_lightning.app.config.validate import load_settings
from rlhf_lightning.app.failures import REFUSALS, exit_with
from rlhf_lightning.app.run_claim import hydra_log
from rlhf_lightning.app.start import MISTAKE, fail, read_words, words_of
from rlhf_lightning.app.sweep import SweepEnd
from rlhf_lightning.distributed.launch import broadcast_from_rank0, end_process, launch_time
from rlhf_lightning.distributed.process import prepare_process
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import drop_refused
from rlhf_lightning.runs.public_config import without_folders
from rlhf_lightning.runs.stopping import RunStoppedError, stopping_on_signals
from rlhf_lightning.runs.summary import Summary, write_summary

register()
prepare_process()


def say(text: str) -> None:
    """Write a line that is seen at once, into a file or pipe too."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def started(folder: RunFolder, summary: Summary, lines: Mapping[str, object]) -> Summary:
    """Print the first screen of a command and write it into its summary, which is returned."""
    # brings torch: a mistake on the command line is reported before
    from rlhf_lightning.callbacks.console import print_start

    print_start(summary.title, folder, lines)
    about = {key: without_folders(str(value)) for key, value in lines.items()}
    summary = replace(summary, about=about)
    write_summary(folder, summary)
    return summary


def check_command_line(entry: str) -> Any:
    """Return the settings that the command line composes; end the process if it is a mistake.

    Args:
        entry: the command, and its file in `conf/`.

    Returns:
        The settings; None for a sweep, which checks each of its jobs, and where flags but
        `--config-dir` are given, which are Hydra's to read.
    """
    return read_words(entry, partial(command_settings, entry))


def run_command(
    entry: str, run: Callable[[Any], Iterable[str] | None], config: str | None = None
) -> None:
    """Read the command line of a command that makes no run folder, and call `run`.

    Args:
        entry: the command, and its file in `conf/`.
        run: called with the settings; lines that it gives are printed.
        config: another file, to which the command adds the group of its name.
    """
    words = words_of(entry)
    with ended_in_one_line(), stopping_on_signals():
        for line in run(load_settings(COMMANDS[entry], config or entry, words)) or ():
            say(line)


@contextmanager
def ended_in_one_line() -> Iterator[None]:
    """End the process in one line where the block fails, or is stopped by a signal."""
    try:
        yield
    except REFUSALS as error:
        fail(str(error))
    except (Exception, KeyboardInterrupt, RunStoppedError) as error:
        exit_with(error)


def run_job(entry: str, job: Callable[[Any], object]) -> None:
    """Have Hydra compose the command line and call `job`; then end this process in order.

    Args:
        entry: the command, and its file in `conf/`.
        job: called with the composed configuration, once for each job of a sweep.
    """
    broadcast_from_rank0("launch time", launch_time)  # of which the names of folders are made
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=entry)(job)()
    except SystemExit as error:
        if error.code == MISTAKE:
            drop_refused(hydra_log(), RunFolder.wandb.name)
        if error.code == 1:
            # Without `on_multirun_end` where the sweeper raised, as Optuna's does if no trial
            # completed.
            SweepEnd.finish()
        if isinstance(error.code, int):
            end_process(error.code)
        raise
    end_process()


def run_in_folder(entry: str, cfg: Any, run: Callable[[Any, RunFolder, list[str]], object]) -> None:
    """Call `run` in the folder of Hydra's job; end the process in one line if it fails.

    Args:
        entry: name of the command.
        cfg: composed configuration.
        run: called with the settings, the folder and the overrides.
    """
    folder, overrides = this_job()
    with ended_in_one_line(), stopping_on_signals():
        settings = command_settings(entry, cfg, overrides)
        run(settings, folder, overrides)


def this_job() -> tuple[RunFolder, list[str]]:
    """Return the folder and the overrides of the job that Hydra runs."""
    config = HydraConfig.get()
    return RunFolder(Path(config.runtime.output_dir)), list(config.overrides.task)
