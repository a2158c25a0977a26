"""What the entry points do alike with a command line, before Hydra takes it.

A mistake is answered in one line, at once, and before Hydra makes a folder for the run.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

from hydra import compose, initialize_config_dir
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from rlhf_lightning.app.config.compose import ConfigError, conf_dir
from rlhf_lightning.app.config.errors import COMPOSE_ERRORS, explain
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


def compose_and_check(config_name: str, check: Callable[[DictConfig], None]) -> DictConfig | None:
    """Return what the command line composes, checked; end the process if it is a mistake.

    Args:
        config_name: in `conf/`.
        check: raises `ConfigError`; not called for a sweep, which checks each of its jobs.

    Returns:
        The configuration without `hydra`; None where flags are given, which are Hydra's to read.
    """
    overrides = sys.argv[1:]
    if any(argument.startswith("-") for argument in overrides):
        return None
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        try:
            cfg = compose(config_name, overrides=overrides, return_hydra_config=True)
            several = cfg.hydra.mode == RunMode.MULTIRUN
            with open_dict(cfg):
                del cfg["hydra"]
            if not several:
                check(cfg)
        except ConfigError as error:
            fail(str(error))
        except COMPOSE_ERRORS as error:
            fail(explain(error, overrides, config_name))
    return cfg


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
