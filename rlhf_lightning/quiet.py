"""What libraries say at every start and what helps nobody."""

from __future__ import annotations

import logging
import os
import warnings


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
