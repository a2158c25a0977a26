"""A run trains one configuration: the same on all ranks, against the same models after a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.distributed.collectives import check_same_on_all_ranks


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


class SameSources(Callback):
    """Refuses to resume if a frozen model is another one than the run began with.

    What scores answers is not in the checkpoint; it is read from its source again.

    Args:
        fingerprints: of each model that the scorer loads, by its folder or hub name.
    """

    KEY = "scorer_fingerprints"

    def __init__(self, fingerprints: Mapping[str, str]) -> None:
        self.fingerprints = dict(fingerprints)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the fingerprints."""
        checkpoint[self.KEY] = sorted(self.fingerprints.values())

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Compare.

        Raises:
            ValueError: if one has changed; the same models may stand in other folders.
        """
        saved = checkpoint.get(self.KEY)
        if saved is None or saved == sorted(self.fingerprints.values()):
            return
        changed = {k: v for k, v in self.fingerprints.items() if v not in saved}
        found = ", ".join(f"{where} ({value[:12]})" for where, value in changed.items())
        raise ValueError(
            f"the checkpoint was trained with the reward model {', '.join(v[:12] for v in saved)}, "
            f"now the scorer is {found or 'without it'}: resume with the one it started with, or "
            "start anew with resume=never"
        )
