"""Exact resume: every rank's random state, one configuration, the same rewards."""

from __future__ import annotations

import functools
import hashlib
import inspect
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

from rlhf_lightning.distributed.collectives import check_same_on_all_ranks, gathered, rank
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
        ranks = gathered(_random_state())
        states = {name: torch.stack([own[name] for own in ranks]) for name in ranks[0]}
        checkpoint[_RANDOM_STATE] = states

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
    # Tensors of fixed size, so that those of all ranks can be stacked.
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
    """Refuses to train if a scorer's models or code differ between ranks or from before.

    They are not in the checkpoint; they are read from their source again. Of a function or a scorer
    of one's own that is its file, and of one in the program that was started its own lines alone,
    with the plain values that it was made with.
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
        """Compare with the checkpoint; say so where it does not name its reward.

        Raises:
            ValueError: if one has changed; the same models may be in other folders.
        """
        saved = checkpoint.get(_REWARDS)
        if trainer.state.fn != "fit" or (saved or []) == sorted(self.found.values()):
            return
        names = ", ".join(f"{where} ({digest[:12]})" for where, digest in self.found.items())
        if saved is None:
            if rank() == 0:
                told = "the checkpoint does not say with which reward it was trained"
                logger.warning(f"{told}: it is continued with {names}")
            return
        changed = [f"{where} ({v[:12]})" for where, v in self.found.items() if v not in saved]
        now = ", ".join(changed) or "what is left of it"
        told = f"the checkpoint was trained with another reward than {now}"
        raise ValueError(f"{told}: restore it, or begin a new run (resume=never)")


def reward_digests(scorer: Any) -> dict[str, str]:
    """Return the fingerprint of each model and the digest of each function or own scorer, by name.

    What is no model folder is left out: loading it says what is wrong. So is code of this package:
    a run continues with a later version of it.
    """
    found: dict[str, str] = {}
    for part in [] if scorer is None else parts_of(scorer):
        for one in getattr(part, "members", [part]):  # of an ensemble
            loads = getattr(getattr(one, "load", None), "keywords", {})
            keys = ("source", "revision")
            source, revision = (loads.get(key) or getattr(one, key, None) for key in keys)
            if isinstance(source, str):
                with suppress(ManifestError):
                    found[source] = source_fingerprint(source, revision)
        found |= _code_digest(part)
    return found


def _code_digest(scorer: Any) -> dict[str, str]:
    """Return the digest of what scores, by its name; nothing of code of this package."""
    name = getattr(scorer, "function_name", None)
    if name is not None:
        place, colon, function = name.rpartition(":" if ":" in name else ".")
        file = place if colon == ":" else getattr(sys.modules.get(place), "__file__", None)
        if file is None or name.startswith("rlhf_lightning."):
            return {}
        return {name: f"{content_digest(Path(file))}:{function}"}
    code: Any = getattr(scorer, "function", scorer)
    values: dict[Any, Any] = {}
    while isinstance(code, functools.partial):
        values.update(enumerate(code.args), **code.keywords)
        code = code.func
    if not inspect.isroutine(code := inspect.unwrap(code)):
        code = type(code)
    if f"{code.__module__}.".startswith("rlhf_lightning."):
        return {}
    if inspect.isfunction(code):
        values |= inspect.getclosurevars(code).nonlocals
    name = f"{code.__module__}.{code.__qualname__}"
    try:
        alone = code.__module__ == "__main__"  # beside all else that a program does
        text = inspect.getsource(code) if alone else Path(inspect.getfile(code)).read_text("utf-8")
    except (OSError, TypeError):
        if rank() == 0:
            logger.warning(f"{name} has no source file: a resume cannot tell if it has changed")
        return {}
    # The text of others may hold a place in memory.
    plain = {k: v for k, v in values.items() if isinstance(v, str | int | float | None)}
    return {name: hashlib.sha256(f"{name}\n{text}\n{plain}".encode()).hexdigest()}
