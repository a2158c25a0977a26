"""Settings of an earlier run, read from its folder as data: validated again, targets included."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from rlhf_lightning.app.config.compose import ConfigError, at
from rlhf_lightning.app.config.recipes import HEAD, run_yaml, schema_line
from rlhf_lightning.app.config.settings import (
    OF_A_JOB,
    RunSettings,
    TrainSettings,
    with_environment,
)
from rlhf_lightning.app.config.validate import SettingsT, read_settings
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import RESOLVED, RunFolder
from rlhf_lightning.runs.public_config import public_config
from rlhf_lightning.runs.reading import read_yaml
from rlhf_lightning.runs.resume import checkpoint_problem
from rlhf_lightning.runs.summary import summary_or_none


def read_saved(
    settings: type[SettingsT], file: Path, read: Callable[..., SettingsT] = read_settings
) -> SettingsT:
    """Return the settings of a run.

    Args:
        settings: the class of its command.
        file: `.hydra/config.yaml` of the run.
        read: `plain_settings` needs no torch.

    Raises:
        ConfigError: if there is none, or if it is not allowed: its values are shown on pages, so
            it reads nothing from the environment of whoever opens the folder.
    """
    content = saved_config(file)
    if settings is TrainSettings and "module" not in content:
        raise ConfigError(f"stage={content.get('stage')} trains nothing: give a run of rlhf-train")
    OmegaConf.register_new_resolver("oc.env", _from_environment, replace=True)
    try:
        found = read(settings, content, saved=True)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    if "${" in str(found.resolved):  # escaped; a command that takes it over would resolve it
        raise ConfigError(f"{file} has a value that becomes an interpolation: write its value")
    return found


def _from_environment(name: str, *default: Any) -> Any:
    if OF_A_JOB.fullmatch(name):  # which `with_environment` leaves as it is written
        return oc.env(name, *default)
    raise ValueError(f"a run's configuration may not read ${name}: write its value")


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


def saved_words(folder: RunFolder) -> list[str]:
    """Return the overrides of a run's command line; none where they are not kept."""
    file = folder.config.with_name("overrides.yaml")
    return [str(word) for word in (read_yaml(file) if file.is_file() else None) or []]


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
    summary, best = summary_or_none(folder), folder.best_checkpoint.resolve()
    with suppress(ConfigError):
        stops = at(saved_config(folder.config), "callbacks.early_stopping") is not None
        completed = summary is not None and summary.status == "completed"
        return best if completed and stops and checkpoint_problem(best) is None else None
    return None


def keep_configuration(settings: RunSettings, folder: RunFolder) -> None:
    """Write the configuration as pages show it, without interpolations and secrets.

    `run.yaml` has what the command line set, and starts the run again. What the configuration
    reads from the environment is saved as its value, unless it is a secret: reading the folder
    later must not need the environment.
    """
    if folder.config.parent.is_dir():
        shown = public_config(settings.resolved, settings.written)
        text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
        write_text(folder.config.with_name(RESOLVED), text)
    if (words := folder.config.with_name("overrides.yaml")).is_file():
        head = HEAD + schema_line() if isinstance(settings, TrainSettings) else HEAD
        write_text(folder.run_yaml, head + run_yaml(read_yaml(words)))
    if folder.config.is_file() and "${oc.env" in folder.config.read_text("utf-8"):
        write_settings(folder.config, settings)


def write_settings(file: Path, settings: RunSettings) -> None:
    """Write the configuration of a command as YAML, with its interpolations to its own keys."""
    content = with_environment(settings.written)
    write_text(file, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
