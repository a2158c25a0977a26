"""All ranks of a run must train the same configuration."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.distributed import check_same_on_all_ranks


class SameConfiguration(Callback):
    """Stops before the first batch if a rank has another configuration or run folder.

    A launcher that repeats a command line can give ranks different ones, and averaged gradients of
    two experiments look like those of one.

    Args:
        digest: of this rank's configuration.
        folder: this rank's run folder.
    """

    def __init__(self, digest: str, folder: str) -> None:
        self.digest = digest
        self.folder = folder

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare.

        Raises:
            RuntimeError: on every rank, if they differ.
        """
        check_same_on_all_ranks("configuration", self.digest)
        check_same_on_all_ranks("run folder", self.folder)
