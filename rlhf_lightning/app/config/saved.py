"""Settings of an earlier run, read from its folder as data: validated again, targets included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_lightning.app.config.compose import ConfigError, at
from rlhf_lightning.app.config.validate import SettingsT, read_settings
from rlhf_lightning.app.stages.spec import find_stage
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.reading import read_yaml
from rlhf_lightning.runs.resume import checkpoint_problem
from rlhf_lightning.runs.summary import summary_or_none


def read_saved(settings: type[SettingsT], file: Path) -> SettingsT:
    """Return the settings of a run.

    Args:
        settings: the class of its command.
        file: `.hydra/config.yaml` of the run.

    Raises:
        ConfigError: if there is none, or if it is not allowed.
    """
    return read_settings(settings, saved_config(file), saved=True)


def saved_config(file: Path) -> dict[str, Any]:
    """Return the configuration of a run as it was written.

    Raises:
        ConfigError: if there is none.
    """
    try:
        content = read_yaml(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is no configuration of a run")
    return content


def working_folder(folder: RunFolder) -> Path:
    """Return the folder in which a run was started; this one if that is not known.

    Raises:
        ConfigError: if the file that says so is damaged.
    """
    file = folder.config.with_name("hydra.yaml")
    content = saved_config(file) if file.is_file() else {}
    return Path(str(at(content, "hydra.runtime.cwd") or "."))


def best_of_early_stopping(folder: RunFolder) -> Path | None:
    """Return the checkpoint with which a finished run with early stopping has ended, else None."""
    summary = summary_or_none(folder)
    if summary is None or summary.status != "completed":
        return None
    try:
        cfg = read_yaml(folder.config)
        validates = not find_stage(cfg["stage"], cfg["module"]["_target_"]).rolls_out
        stops = validates and cfg["callbacks"]["early_stopping"] is not None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    best = folder.best_checkpoint.resolve()
    return best if stops and checkpoint_problem(best) is None else None
