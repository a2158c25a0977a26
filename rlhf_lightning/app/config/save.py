"""What is kept of a run's configuration: no secrets, and how it differs from what is shipped."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rlhf_lightning.app.config.compose import plain
from rlhf_lightning.runs.changes import find_changes, write_changes
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.secrets import learn_secrets, redact_files, redact_logs

logger = logging.getLogger(__name__)


def keep_secrets(cfg: DictConfig, folder: RunFolder | None) -> None:
    """Remove the secrets of `cfg` and of the environment from saved files and from every log.

    Args:
        cfg: of the run.
        folder: of the run, in whose `.hydra/` the configuration is; None rewrites no file.
    """
    learn_secrets(plain(cfg), OmegaConf.to_container(cfg, resolve=False))
    redact_logs()
    if folder is not None:
        saved = folder.config.parent.glob("*.yaml")
        redact_files(*saved, folder.path.parent / "multirun.yaml")


def keep_changes(cfg: DictConfig, folder: RunFolder, overrides: Sequence[str]) -> None:
    """Write in what `cfg` differs from its experiment as it is shipped.

    Args:
        cfg: composed configuration.
        folder: of the run.
        overrides: of the command line. Without an experiment there is nothing to compare with.
    """
    experiment = [o for o in overrides if o.removeprefix("+").startswith("experiment=")]
    if not experiment or not GlobalHydra.instance().is_initialized():
        return
    loader = GlobalHydra.instance().config_loader()
    try:
        shipped = loader.load_configuration("train", experiment, RunMode.RUN)
    except (HydraException, OmegaConfBaseException) as error:
        logger.debug("no default to compare with: %s", error)
        return
    with open_dict(shipped):
        del shipped["hydra"]
    write_changes(folder, find_changes(_written(shipped), _written(cfg)))


def _written(cfg: DictConfig) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False))
