"""Saved configurations."""

from __future__ import annotations

from pathlib import Path

import yaml

from rlhf_lightning.app.config.settings import RunSettings, with_environment
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import RESOLVED, RunFolder
from rlhf_lightning.runs.public_config import public_config


def keep_configuration(settings: RunSettings, folder: RunFolder) -> None:
    """Write the configuration as pages show it, without interpolations and secrets.

    What the configuration reads from the environment is saved as its value, unless it is a secret:
    reading the folder later must not need the environment.
    """
    if folder.config.parent.is_dir():
        shown = public_config(settings.resolved, settings.written)
        text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
        write_text(folder.config.with_name(RESOLVED), text)
    if folder.config.is_file() and "${oc.env" in folder.config.read_text("utf-8"):
        write_settings(folder.config, settings)


def write_settings(file: Path, settings: RunSettings) -> None:
    """Write the configuration of a command as YAML, with its interpolations to its own keys."""
    content = with_environment(settings.written)
    write_text(file, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
