"""A run trains one configuration on all ranks, with the same rewards on each and after a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.distributed.collectives import check_same_on_all_ranks
from rlhf_lightning.runs.resume import CONFIG_HASH


class SameConfiguration(Callback):
    """Stops before the first batch if a rank has another configuration or run folder.

    A launcher that repeats a command line can give ranks different ones, and averaged gradients of
    two experiments look like those of one.

    Args:
        digest: digest of this rank's configuration.
        folder: this rank's run folder.
    """

    def __init__(self, digest: str, folder: str) -> None:
        self.digest = digest
        self.folder = folder

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Compare, before the ranks compare their data: that differs because of this.

        Raises:
            RuntimeError: on every rank, if they differ.
        """
        check_same_on_all_ranks("configuration", self.digest)
        check_same_on_all_ranks("run folder", self.folder)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the digest: a checkpoint that was copied from another run is not continued."""
        checkpoint[CONFIG_HASH] = self.digest


class SameSources(Callback):
    """Refuses to train if a scorer's models or functions differ between ranks or from before.

    They are not in the checkpoint; they are read from their source again.

    Args:
        models: fingerprint of each model that the scorer loads, by its folder or hub name.
        functions: SHA-256 of the file of each reward function, by its name.
    """

    def __init__(self, models: Mapping[str, str], functions: Mapping[str, str]) -> None:
        # By what it is, and its key in a checkpoint.
        self.found = {
            ("reward model", "scorer_fingerprints"): dict(models),
            ("reward function", "reward_functions"): dict(functions),
        }

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the ranks.

        Raises:
            RuntimeError: on every rank, if they differ.
        """
        for (what, _), found in self.found.items():
            check_same_on_all_ranks(what, str(found))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the fingerprints."""
        checkpoint |= {key: sorted(found.values()) for (_, key), found in self.found.items()}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Compare with the checkpoint.

        Raises:
            ValueError: if one has changed; the same models may be in other folders.
        """
        for (what, key), found in self.found.items():
            saved = checkpoint.get(key)
            if saved is None or saved == sorted(found.values()):
                continue
            changed = [f"{where} ({v[:12]})" for where, v in found.items() if v not in saved]
            now = ", ".join(changed) or "those that are left"
            raise ValueError(
                f"the checkpoint was trained with another {what} than {now}: resume "
                "with the one it started with, or start a new run with resume=never"
            )
