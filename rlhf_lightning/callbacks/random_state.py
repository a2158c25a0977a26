"""The random state of every rank in the checkpoint: Lightning restores none of it."""

from __future__ import annotations

import logging
import math
import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

logger = logging.getLogger(__name__)

_RANDOM_STATE = "rlhf_lightning.random_state"


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
        """Restore the state of this rank."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        ranks = next(iter(loaded.values())).shape[0]
        if ranks != trainer.world_size:
            logger.warning(
                f"the checkpoint was written by {ranks} processes, this run has "
                f"{trainer.world_size}: it continues, but not bit for bit"
            )
        rank = trainer.global_rank % ranks
        # Copies: torch.set_rng_state reads elsewhere where its tensor begins inside of a storage.
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
