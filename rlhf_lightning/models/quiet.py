"""Silence for what Lightning, transformers and their clients say in every run."""

from __future__ import annotations

import logging
import os
import warnings

_EVERY_RUN = ("GPU available", "TPU available", "💡 Tip", "Loading `train_data", "`Trainer.fit`")
_RANK_ZERO = "lightning.pytorch.utilities.rank_zero"


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_EVERY_RUN)


def quieten(*, news: bool = False) -> None:
    """Show no lines that every run has; imports transformers.

    Args:
        news: show the lines that Lightning's logger is given of data and learning rates, which a
            command prints itself.
    """
    if news:
        logging.getLogger(_RANK_ZERO).addFilter(_is_news)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*have no `validation_step`.*")
    warnings.filterwarnings("ignore", message=".*in eval mode at the start of training.*")
    lightning = ["lightning.pytorch.accelerators.cuda", "lightning.fabric.utilities.seed"]
    lightning += [] if news else [_RANK_ZERO]
    for name in (*lightning, "httpx", "httpx2", "openai"):  # a line for each request
        logging.getLogger(name).setLevel(logging.WARNING)
    quieten_transformers()


def quieten_transformers() -> None:
    """Show only errors of transformers, here and in child processes, unless the user asks."""
    from transformers.utils import logging as transformers_logging  # the annotation page needs none

    transformers_logging.disable_progress_bar()  # of loading and saving a few megabytes
    if os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error") == "error":
        transformers_logging.set_verbosity_error()  # it read the variable when it was imported
