"""Saved configurations, and their differences from what is shipped."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_lightning.app.config.settings import RunSettings, TrainSettings, with_environment
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.changes import ABSENT, Change, find_changes, write_changes
from rlhf_lightning.runs.folder import RESOLVED, RunFolder
from rlhf_lightning.runs.public_config import public_config

logger = logging.getLogger(__name__)


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


def keep_changes(settings: TrainSettings, folder: RunFolder, overrides: Sequence[str]) -> None:
    """Write what the command line has set, with the values of the experiment as shipped.

    Of a group that it chose that is the name of the choice. The seed is told elsewhere.

    Args:
        settings: settings of the run.
        folder: folder of the run.
        overrides: overrides of the command line. Without an experiment nothing is compared.
    """
    keys = list(dict.fromkeys(word.lstrip("+~").partition("=")[0] for word in overrides))
    experiment = [o for o in overrides if o.removeprefix("+").startswith("experiment=")]
    if not experiment or not GlobalHydra.instance().is_initialized():
        return
    loader = GlobalHydra.instance().config_loader()
    try:
        shipped = loader.load_configuration("train", experiment, RunMode.RUN)
        chosen = loader.load_configuration("train", list(overrides), RunMode.RUN)
    except (HydraException, OmegaConfBaseException) as error:
        logger.debug("no default to compare with: %s", error)
        return
    before, after = ({**it.hydra.runtime.choices, "experiment": None} for it in (shipped, chosen))
    groups = [Change(k, str(before.get(k, ABSENT)), str(after[k])) for k in keys if k in after]
    values = [key for key in keys if key not in after and key != "seed"]
    default: Any = OmegaConf.create({})
    for key in values:
        with suppress(OmegaConfBaseException):  # it waits for another value
            found = OmegaConf.select(shipped, key, default=ABSENT)
            OmegaConf.update(default, key, found, force_add=True)
    plain: Any = OmegaConf.to_container(default, resolve=False)
    told = [group for group in groups if group.default != group.value]
    write_changes(folder, [*told, *find_changes(values, plain, settings.resolved)])


def write_settings(file: Path, settings: RunSettings) -> None:
    """Write the configuration of a command as YAML, with its interpolations to its own keys."""
    content = with_environment(settings.written)
    write_text(file, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
