"""Checkpoint files that are whole, or not there."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from rlhf_lightning.runs.atomic import replacing
from rlhf_lightning.runs.resume import checkpoint_problem
from rlhf_lightning.sharded_checkpoint import read_full


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint file in one step, read back and on disk before it takes its name.

    It reads sharded checkpoints too, so that a run goes on under another strategy.

    Lightning pickles into memory and then moves a file from `$TMPDIR`; across filesystems that
    is a plain copy, and a kill destroys the former file too. Only rank 0 comes here.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint` to `path`, or leave there what was there before.

        Raises:
            OSError: if what was written cannot be read back.
        """
        del storage_options
        with replacing(Path(path)) as file:
            torch.save(checkpoint, file)
            file.flush()
            if problem := checkpoint_problem(file.name):
                raise OSError(f"the checkpoint {path} cannot be read back: {problem}")

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return the checkpoint; it is read as data, whatever is asked for."""
        del weights_only
        if Path(path).is_dir():
            return read_full(Path(path))
        checkpoint: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only=True)
        return checkpoint


def silence_resume_warnings() -> None:
    """Silence what Lightning says about resuming and does not apply: the sampler is resumable."""
    for message in (
        ".*your dataloader is not resumable.*",
        ".*that ended before the epoch ended.*",
        ".*callbacks used when creating the checkpoint.*",
        ".*dirpath has changed from.*",
    ):
        warnings.filterwarnings("ignore", message=message)
