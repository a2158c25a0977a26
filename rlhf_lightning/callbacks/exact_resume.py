"""Exact resume: every rank's random state, one configuration, the same rewards."""

from __future__ import annotations

import logging
import math
import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.distributed.collectives import check_same_on_all_ranks
from rlhf_lightning.modules.rewards import parts_of
from rlhf_lightning.runs.manifest import ManifestError, content_digest, source_fingerprint
from rlhf_lightning.runs.resume import CONFIG_HASH

logger = logging.getLogger(__name__)

_RANDOM_STATE = "rlhf_lightning.random_state"
_REWARDS = "rlhf_lightning.rewards"


class RandomState(Callback):
    """Save and restore the generators of torch, CUDA, NumPy and Python, of every rank.

    They are restored in `on_train_start`, because setting up the loaders draws from them.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, torch.Tensor] | None = None

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put the state of every rank into the checkpoint, `[world, ...]` each; all ranks call."""
        state = _random_state()
        if trainer.world_size > 1:
            gathered: Any = pl_module.all_gather(state)
            checkpoint[_RANDOM_STATE] = {name: value.cpu() for name, value in gathered.items()}
        else:
            checkpoint[_RANDOM_STATE] = {name: value[None] for name, value in state.items()}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the states until training starts."""
        self._loaded = checkpoint.get(_RANDOM_STATE)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the state of this rank; one that the checkpoint lacks keeps its own."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        ranks = next(iter(loaded.values())).shape[0]
        if ranks != trainer.world_size:
            now = f"this run has {trainer.world_size}, and continues not bit for bit"
            logger.warning(f"the checkpoint was written by {ranks} processes, {now}")
        if (rank := trainer.global_rank) < ranks:
            # Copies: torch.set_rng_state reads elsewhere where its tensor begins inside a storage.
            _restore_random_state({name: value[rank].clone() for name, value in loaded.items()})


def _random_state() -> dict[str, torch.Tensor]:
    # Tensors of fixed size, so that ranks can exchange them and a checkpoint needs no pickle.
    _, keys, position, has_gauss, cached = np.random.get_state()
    _, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy_keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        "python_words": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    position, has_gauss, cached = state["numpy_rest"].tolist()
    keys = state["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    gauss = state["python_gauss"].item()
    words = tuple(state["python_words"].tolist())
    random.setstate((3, words, None if math.isnan(gauss) else gauss))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu())


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


class SameRewards(Callback):
    """Refuses to train if a scorer's models or functions differ between ranks or from before.

    They are not in the checkpoint; they are read from their source again. A function that was given
    itself, and not by its name, is not compared.
    """

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read what the scorer is made of."""
        if stage == "fit":
            self.found = reward_digests(getattr(pl_module, "scorer", None))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the ranks.

        Raises:
            RuntimeError: on every rank, if they differ.
        """
        check_same_on_all_ranks("reward", str(self.found))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the digests."""
        checkpoint[_REWARDS] = sorted(self.found.values())

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Compare with the checkpoint.

        Raises:
            ValueError: if one has changed; the same models may be in other folders.
        """
        saved = checkpoint.get(_REWARDS)
        if trainer.state.fn != "fit" or saved in (None, sorted(self.found.values())):
            return
        changed = [f"{where} ({v[:12]})" for where, v in self.found.items() if v not in saved]
        now = ", ".join(changed) or "what is left of it"
        told = f"the checkpoint was trained with another reward than {now}"
        raise ValueError(f"{told}: restore it, or begin a new run (resume=never)")


def reward_digests(scorer: Any) -> dict[str, str]:
    """Return the fingerprint of each model, and the SHA-256 of the file of each function, by name.

    What is no model folder is left out: loading it says what is wrong. So are functions of this
    package: a run continues with a later version of it.
    """
    found: dict[str, str] = {}
    for part in parts_of(scorer):
        for one in getattr(part, "members", [part]):  # of an ensemble
            loads = getattr(getattr(one, "load", None), "keywords", {})
            keys = ("source", "revision")
            source, revision = (loads.get(key) or getattr(one, key, None) for key in keys)
            if isinstance(source, str):
                with suppress(ManifestError):
                    found[source] = source_fingerprint(source, revision)
        name = getattr(part, "function_name", None) or "rlhf_lightning."
        place, colon, _ = name.rpartition(":" if ":" in name else ".")
        file = place if colon == ":" else getattr(sys.modules.get(place), "__file__", None)
        if file is not None and not name.startswith("rlhf_lightning."):
            found[name] = content_digest(Path(file))
    return found
