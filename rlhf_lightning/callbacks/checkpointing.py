"""Checkpoints that a kill cannot damage and from which a run continues bit for bit.

A checkpoint is written at the end of an iteration, after the validation that belongs to it. If it
were written before, as `ModelCheckpoint` does, Lightning would skip that validation on resume:
early stopping and the best checkpoint would then see fewer validations than without the kill.
Hence no module may change its state in `on_train_batch_end` or `on_validation_end`, which
Lightning calls after the callbacks.
"""

from __future__ import annotations

import logging
import math
import shutil
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from rlhf_lightning.callbacks.iterations import (
    current_iteration,
    fresh_metrics,
    last_iteration,
    validation_follows,
)
from rlhf_lightning.runs.atomic import link_atomically, replacing
from rlhf_lightning.runs.resume import checkpoint_iteration, checkpoint_problem

logger = logging.getLogger(__name__)

_SHOULD_STOP = "rlhf_lightning.should_stop"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint file in one step, on disk before it takes its name.

    Lightning pickles into memory and then moves a file from `$TMPDIR`; across filesystems that
    is a plain copy, and a kill destroys the former file too. Only rank 0 comes here.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint` to `path`, or leave there what was there before."""
        del storage_options
        with replacing(Path(path)) as file:
            torch.save(checkpoint, file)


class IterationCheckpoint(Checkpoint):
    """Save every few iterations, at the last one, and whenever the monitored metric is best.

    The folder holds `iteration=000012.ckpt` files, the link `last.ckpt` to the newest and, with
    a `monitor`, the link `best.ckpt`. A link changes its target in one step and before the file
    it led to goes, so `last.ckpt` never leads nowhere.

    Args:
        dirpath: the folder, `RunFolder.checkpoints`.
        every_n_iterations: how often to save.
        keep_last: how many of the newest to keep; the best is kept besides.
        monitor: a validation metric, e.g. `val/loss`; None for no best.
        mode: whether the metric should be small or large.

    Raises:
        ValueError: for a number below 1 or an unknown mode.
    """

    def __init__(
        self,
        dirpath: Path | str,
        *,
        every_n_iterations: int = 10,
        keep_last: int = 2,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        for name, value in (("every_n_iterations", every_n_iterations), ("keep_last", keep_last)):
            if value < 1:
                raise ValueError(f"IterationCheckpoint.{name}={value}, expected at least 1")
        if mode not in ("min", "max"):
            raise ValueError(f"IterationCheckpoint.mode={mode!r}, expected 'min' or 'max'")
        self.dirpath = Path(dirpath)
        self.every_n_iterations = every_n_iterations
        self.keep_last = keep_last
        self.monitor = monitor
        self.mode = mode
        self.best_model_score: float | None = None
        self.best_iteration: int | None = None
        self._should_stop = False
        self._saved_at = 0
        self._dry = False

    @property
    def best_model_path(self) -> str:
        """The path of the best checkpoint, "" if there is none."""
        return "" if self.best_iteration is None else str(self._path(self.best_iteration))

    @property
    def last_model_path(self) -> str:
        """The path of the newest checkpoint of this run, "" if there is none."""
        return str(self._path(self._saved_at)) if self._saved_at else ""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note whether this is a dry run, which saves nothing."""
        self._dry = bool(getattr(trainer, "fast_dev_run", False))
        silence_resume_warnings()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take up where the checkpoint left off, and drop what was written after it.

        Raises:
            FileExistsError: if the run starts from nothing and a complete checkpoint is there.
        """
        self._saved_at = start = current_iteration(trainer)
        trainer.should_stop = trainer.should_stop or self._should_stop
        if self._dry:
            return
        if start == 0:
            self._refuse_to_start_over()
        # Every rank has looked before rank 0 deletes, so that all of them raise or none.
        trainer.strategy.barrier("IterationCheckpoint.on_train_start")
        if trainer.is_global_zero:
            self._drop_after(start)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save, unless a validation belongs to this iteration: then wait for it."""
        if self._due(trainer) and not validation_follows(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if it is time or if the monitored metric is the best so far."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self._take_best(trainer) or self._due(trainer):
            self._save(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember that early stopping has decided; Lightning forgets it."""
        checkpoint[_SHOULD_STOP] = bool(trainer.should_stop)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take that decision over."""
        self._should_stop = bool(checkpoint.get(_SHOULD_STOP, False))

    def state_dict(self) -> dict[str, Any]:
        """Return what the best is so far."""
        return {"best_model_score": self.best_model_score, "best_iteration": self.best_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what the best was; a best checkpoint that is gone is none."""
        iteration = state_dict["best_iteration"]
        if iteration is not None and self._path(iteration).exists():
            self.best_model_score, self.best_iteration = state_dict["best_model_score"], iteration

    def _refuse_to_start_over(self) -> None:
        complete = [path for path in self._files() if checkpoint_problem(path) is None]
        if complete:
            raise FileExistsError(
                f"{self.dirpath} holds the checkpoints of another run, e.g. {complete[-1].name}: "
                "continue it with resume=auto or ckpt_path=, or choose another run folder"
            )

    def _drop_after(self, start: int) -> None:
        for unfinished in self.dirpath.glob(".*.tmp-*"):  # what a kill left behind
            _remove(unfinished)
        later = [path for path in self._files() if (checkpoint_iteration(path) or 0) > start]
        if later:
            self._relink("last.ckpt", start)
        for path in later:
            logger.warning("removing %s: the run continues from iteration %d", path, start)
            _remove(path)

    def _due(self, trainer: Trainer) -> bool:
        iteration = current_iteration(trainer)
        final = iteration == last_iteration(trainer) or trainer.should_stop
        return not self._dry and (iteration % self.every_n_iterations == 0 or final)

    def _take_best(self, trainer: Trainer) -> bool:
        if self.monitor is None or self._dry:
            return False
        metrics = fresh_metrics(trainer)
        if self.monitor not in metrics:
            raise KeyError(
                f"IterationCheckpoint.monitor={self.monitor!r} was not logged by the validation: "
                f"use one of {', '.join(sorted(metrics)) or 'nothing, it logs nothing'}"
            )
        score = metrics[self.monitor]
        best = self.best_model_score
        better = best is None or (score < best if self.mode == "min" else score > best)
        better = trainer.strategy.reduce_boolean_decision(better and not math.isnan(score))
        if better:
            self.best_model_score, self.best_iteration = score, current_iteration(trainer)
        return better

    def _save(self, trainer: Trainer) -> None:
        iteration = current_iteration(trainer)
        path = self._path(iteration)
        if trainer.is_global_zero and path.is_dir():
            _remove(path)  # a distributed checkpoint written in place would mix old and new
        trainer.save_checkpoint(path, weights_only=False)
        self._saved_at = iteration
        if trainer.is_global_zero:
            self._relink("last.ckpt", iteration)
            if self.best_iteration is not None:
                self._relink("best.ckpt", self.best_iteration)
            self._prune()
        trainer.strategy.barrier("IterationCheckpoint._save")

    def _prune(self) -> None:
        by_age = self._files()
        for path in by_age[: -self.keep_last]:
            if checkpoint_iteration(path) != self.best_iteration:
                _remove(path)

    def _relink(self, name: str, iteration: int) -> None:
        if self._path(iteration).exists():
            link_atomically(self.dirpath / name, self._path(iteration))

    def _files(self) -> list[Path]:
        return sorted(self.dirpath.glob("iteration=*.ckpt")) if self.dirpath.is_dir() else []

    def _path(self, iteration: int) -> Path:
        return self.dirpath / f"iteration={iteration:06d}.ckpt"


def silence_resume_warnings() -> None:
    """Silence what Lightning says about resuming and does not apply: the sampler is resumable."""
    for message in (
        ".*your dataloader is not resumable.*",
        ".*that ended before the epoch ended.*",
        ".*callbacks used when creating the checkpoint.*",
        ".*dirpath has changed from.*",
    ):
        warnings.filterwarnings("ignore", message=message)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
