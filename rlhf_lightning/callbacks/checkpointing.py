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
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, WeightAveraging
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.plugins.io import TorchCheckpointIO

from rlhf_lightning.arguments import Above0, Count, CountOrZero, Name, checked
from rlhf_lightning.callbacks import iterations
from rlhf_lightning.callbacks.iterations import VALIDATION, current_iteration, fresh_metrics
from rlhf_lightning.data.record_datamodule import RecordDataModule
from rlhf_lightning.distributed.checkpoint import read_full
from rlhf_lightning.distributed.collectives import agreed_max, rank
from rlhf_lightning.modules.checkpoint_state import log_changed
from rlhf_lightning.runs.atomic import link_atomically, remove, replacing
from rlhf_lightning.runs.lock import FolderTakenError
from rlhf_lightning.runs.resume import checkpoint_iteration
from rlhf_lightning.runs.stopping import STOP_SIGNALS, RunStoppedError, SignalWatch

logger = logging.getLogger(__name__)
# The larger, the more it asks for; what one rank says is done by all.
_SAVE, _MAX_TIME = 1, 2
_SIGNALS = {number: code for code, number in enumerate(STOP_SIGNALS, start=3)}
_STOPS = {code: number.name for number, code in _SIGNALS.items()}
_STOPS[_MAX_TIME] = "max_time of the Trainer is over"
Mode = Literal["min", "max"]
_STATE = ("best_model_score", "best_iteration", "monitor", "mode")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint file in one step, on disk before it takes its name.

    It reads sharded checkpoints too, so that a run can continue under another strategy.

    Lightning pickles into memory and then moves a file from `$TMPDIR`; across filesystems that is a
    plain copy, and a kill destroys the former file too. Only rank 0 calls it.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint` to `path`, or leave there what was there before."""
        with replacing(Path(path)) as file:
            torch.save(checkpoint, file)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint; it is read as data, whatever is asked for."""
        if Path(path).is_dir():
            return read_full(Path(path))
        return super().load_checkpoint(path, map_location, weights_only=True)


class IterationCheckpoint(Checkpoint):
    """Save every few iterations or minutes, at the last one, when asked to stop, and the best.

    The folder holds `iteration=000012.ckpt` files, the link `last.ckpt` to the newest and, with a
    `monitor`, the link `best.ckpt`. A link changes its target in one step, before its former target
    is deleted, so `last.ckpt` is never dangling.

    SIGTERM, SIGUSR1 and the Trainer's `max_time` end the run with `RunStoppedError` after the
    current iteration and its checkpoint, on all ranks, whichever of them got the signal.

    A run with `PatientStopping` ends with the weights of its best checkpoint, which later
    measurement, export and publication use; `last.ckpt` stays the end of training.

    Args:
        dirpath: folder of the checkpoints, `RunFolder.checkpoints`.
        every_n_iterations: how often to save; None leaves it to `every_minutes`.
        every_minutes: minutes after the last save at which to save again; None for no such rule.
        keep_last: how many of the newest to keep, not counting the best.
        monitor: the metric of the best checkpoint, None for no best. One of the validation, e.g.
            `val/loss`, is compared after each validation, another one at each save.
        mode: whether the metric should be small or large; None of a loss, which should be small.

    Attributes:
        ended_with: the iteration whose weights the run ended with, None if they are the last ones.

    Raises:
        ValueError: for a number below 1, or another metric than a loss without a mode.
    """

    @checked
    def __init__(
        self,
        dirpath: Path | str,
        *,
        every_n_iterations: Count | None = 10,
        every_minutes: Above0 | None = None,
        keep_last: Count = 2,
        monitor: str | None = None,
        mode: Mode | None = None,
    ) -> None:
        self.dirpath = Path(dirpath)
        self.every_n_iterations = every_n_iterations
        self.keep_last = keep_last
        self.monitor = monitor
        self.mode = mode_of(monitor, mode)
        self.best_model_score: float | None = None
        self.best_iteration: int | None = None
        self.ended_with: int | None = None
        self.every_minutes = every_minutes
        self._last_save = 0.0  # seconds since 1970
        told = "the run stops, with a checkpoint, after this iteration"
        self._signals = SignalWatch(lambda: "" if rank() else told)
        self._logged: dict[str, float] = {}  # what the monitored metric is one of
        self._dry = False

    @property
    def best_model_path(self) -> str:
        """The path of the best checkpoint, "" if there is none."""
        return "" if self.best_iteration is None else str(self._path(self.best_iteration))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note whether this is a dry run, which saves nothing; silence what does not apply."""
        self._dry = bool(getattr(trainer, "fast_dev_run", False))
        # What Lightning says about resuming: the sampler is resumable.
        said = ["your dataloader is not resumable", "that ended before the epoch ended"]
        said += ["callbacks used when creating the checkpoint", "dirpath has changed from"]
        for part in said:
            warnings.filterwarnings("ignore", message=f".*{part}.*")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take up where the checkpoint left off, and drop what was written after it.

        Raises:
            FileNotFoundError: on every rank, if early stopping needs a best checkpoint that is
                neither here nor beside the one that is continued.
            FolderTakenError: if a new run would remove checkpoints of another.
            ValueError: if the monitored metric is of a validation, and there is none, or if another
                callback would put its weights over the best.
        """
        self.ended_with = None
        others: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        averages = [type(one).__name__ for one in others if isinstance(one, WeightAveraging)]
        if averages and _may_stop_early(trainer):
            raise ValueError(f"early_stopping ends with the best weights: remove {averages[0]}")
        if self._waits_for_validation and not iterations.validates(trainer):
            fix = "monitor what training logs, or set validation_fraction"
            raise ValueError(f"monitor={self.monitor!r}, but this run does not validate: {fix}")
        start = current_iteration(trainer)
        # A fit that early stopping had ended stays so, unless there is more patience now.
        reasons = [stop.stopping_reason for stop in trainer.early_stopping_callbacks]
        stopped = any(reason is not EarlyStoppingReason.NOT_STOPPED for reason in reasons)
        trainer.should_stop = trainer.should_stop or stopped
        if start and not isinstance(getattr(trainer, "datamodule", None), RecordDataModule):
            fix = "give fit(module, datamodule=...) a DataModule of rlhf_lightning"
            logger.warning(f"after iteration {start} the loader may begin again: {fix}")
        self._last_save = time.time()
        self._signals.start()
        if self._dry:
            self.best_model_score = self.best_iteration = None
            return
        if self.best_iteration is not None:  # first: a run that is refused has deleted nothing
            self._copy_best(trainer, self.best_iteration)
        if trainer.is_global_zero:
            self._drop_after(start)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Number the iteration for loggers."""
        iterations.number_for_loggers(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Save, unless a validation belongs to this iteration: then wait for it.

        Raises:
            RunStoppedError: on every rank, if the run was asked to stop; it is saved.
            ValueError: if the monitored metric was not logged; it is saved.
        """
        if self.monitor is not None:
            self._logged = fresh_metrics(trainer)
        if not iterations.validation_follows(trainer):
            self._end_iteration(trainer, best=not self._waits_for_validation)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if it is time or if the monitored metric is the best so far.

        Raises:
            RunStoppedError: as `on_train_batch_end` does.
        """
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            if self._waits_for_validation:
                self._logged = fresh_metrics(trainer)
            self._end_iteration(trainer, best=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the signals back, and load the best weights, on every rank, if they are wanted."""
        self._signals.stop()
        last = current_iteration(trainer)
        if not _may_stop_early(trainer) or self.best_iteration in (None, last):
            return
        strategy: Any = trainer.strategy
        strategy.load_model_state_dict(strategy.load_checkpoint(Path(self.best_model_path)))
        strategy.barrier("IterationCheckpoint.on_train_end")
        self.ended_with = self.best_iteration
        if trainer.is_global_zero:
            best = f"{self.best_iteration} ({self.monitor} {self.best_model_score:.4g})"
            logger.warning(f"early stopping: the weights are those of iteration {best}, not {last}")

    def on_exception(self, *_: Any) -> None:
        """Give the signals back."""
        self._signals.stop()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Let a longer run continue a finished one."""
        iterations.reopen_epoch(trainer, checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """Return what the best is so far, and by which metric."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what the best was, unless it was the best by another metric."""
        own, saved = (self.monitor, self.mode), (state_dict["monitor"], state_dict["mode"])
        if own != saved:
            log_changed("IterationCheckpoint.monitor, mode", own, saved)
            return
        self.best_model_score = state_dict["best_model_score"]
        self.best_iteration = state_dict["best_iteration"]

    @property
    def _waits_for_validation(self) -> bool:
        return self.monitor is not None and self.monitor.startswith(VALIDATION)

    def _copy_best(self, trainer: Trainer, best: int) -> None:
        """Copy the best checkpoint here, if the run is continued from another folder."""
        here = self._path(best)
        source = Path(trainer.ckpt_path or "").resolve().with_name(here.name)
        if trainer.is_global_zero and source.exists() and not here.exists():
            here.parent.mkdir(parents=True, exist_ok=True)
            copy: Callable[..., Any] = shutil.copytree if source.is_dir() else shutil.copyfile
            copy(source, here)
        if trainer.strategy.broadcast(here.exists()):
            return
        lost = f"the best checkpoint so far, that of iteration {best}, is not beside the newest one"
        if trainer.early_stopping_callbacks:
            fix = f"copy it to {source}, or leave callbacks.early_stopping out"
            raise FileNotFoundError(f"{lost}: {fix}")
        if trainer.is_global_zero:
            logger.warning("%s; the next one counts as the best", lost)
        self.best_model_score = self.best_iteration = None

    def _drop_after(self, start: int) -> None:
        later = [path for path in self._files() if (checkpoint_iteration(path) or 0) > start]
        if later and not start:
            ways = f"continue it with ckpt_path={later[-1]}, or choose another folder"
            raise FolderTakenError(f"{self.dirpath} holds the checkpoints of another run: {ways}")
        self._relink_all(start)
        for path in (*later, *self.dirpath.glob(".iteration=*.tmp-*")):  # and what a kill has left
            logger.warning("removing %s: the run continues from iteration %d", path, start)
            remove(path)

    def _agreed(self, trainer: Trainer) -> int:
        """Return the most that a rank asks for; every rank calls it equally often."""
        if self._signals.received is not None:
            own = _SIGNALS[self._signals.received]
        elif iterations.out_of_time(trainer):
            own = _MAX_TIME
        else:
            every, since = self.every_minutes, time.time() - self._last_save
            own = _SAVE if every is not None and since >= 60 * every else 0
        return agreed_max(own, trainer.strategy.root_device)

    def _end_iteration(self, trainer: Trainer, *, best: bool) -> None:
        asked = self._agreed(trainer)
        if self._dry:
            return
        iteration, every = current_iteration(trainer), self.every_n_iterations
        due = bool(asked) or iterations.is_last_iteration(trainer) or trainer.should_stop
        due = due or (every is not None and iteration % every == 0)
        # A metric of training is compared where a checkpoint is due anyway: there is one for each
        # iteration, and hardly any would not be the best for a while.
        compares = best and self.monitor is not None and (self._waits_for_validation or due)
        unknown = compares and self.monitor not in self._logged
        if compares and not unknown:
            due = self._take_best(trainer) or due
        if due or unknown:
            self._save(trainer, iteration)
        if unknown:
            known = ", ".join(["null", *sorted(self._logged)])
            told = f"monitor={self.monitor!r} was not logged, iteration {iteration} is saved"
            raise ValueError(f"{told}: continue with one of {known}")
        if asked in _STOPS:
            last = iterations.last_iteration(trainer)
            raise RunStoppedError(f"{_STOPS[asked]}: saved after iteration {iteration} of {last}")

    def _take_best(self, trainer: Trainer) -> bool:
        score, best = self._logged[str(self.monitor)], self.best_model_score
        better = best is None or (score < best if self.mode == "min" else score > best)
        better = trainer.strategy.reduce_boolean_decision(better and not math.isnan(score))
        if better:
            self.best_model_score, self.best_iteration = score, current_iteration(trainer)
        return better

    def _save(self, trainer: Trainer, iteration: int) -> None:
        trainer.save_checkpoint(self._path(iteration), weights_only=False)
        if trainer.is_global_zero:
            self._relink_all(iteration)
            for path in self._files()[: -self.keep_last]:
                if checkpoint_iteration(path) != self.best_iteration:
                    remove(path)
        trainer.strategy.barrier("IterationCheckpoint._save")
        self._last_save = time.time()

    def _relink_all(self, last: int) -> None:
        for name, iteration in {"last.ckpt": last, "best.ckpt": self.best_iteration}.items():
            if iteration is None:
                (self.dirpath / name).unlink(missing_ok=True)
            elif self._path(iteration).exists():
                link_atomically(self.dirpath / name, self._path(iteration))

    def _files(self) -> list[Path]:
        return sorted(self.dirpath.glob("iteration=*.ckpt")) if self.dirpath.is_dir() else []

    def _path(self, iteration: int) -> Path:
        return self.dirpath / f"iteration={iteration:06d}.ckpt"


def mode_of(monitor: str | None, mode: Mode | None) -> Mode:
    """Return whether a metric should be small or large.

    Raises:
        ValueError: for another metric than a loss without a mode.
    """
    if mode is None and monitor is not None and not monitor.endswith("loss"):
        fix = "mode=min or mode=max says if it should be small or large"
        raise ValueError(f"monitor={monitor!r} is no loss: {fix}")
    return mode or "min"


def _may_stop_early(trainer: Trainer) -> bool:
    return any(isinstance(one, PatientStopping) for one in trainer.early_stopping_callbacks)


def ended_with(trainer: Trainer) -> int | None:
    """Return the iteration whose weights early stopping has kept; None for the last ones."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((c.ended_with for c in callbacks if isinstance(c, IterationCheckpoint)), None)


def kept_weights(trainer: Trainer) -> dict[str, str]:
    """Return what a page says of the weights that a run has ended with."""
    best = ended_with(trainer)
    return {"weights": f"those of iteration {best}"} if best else {}


class PatientStopping(EarlyStopping):
    """Lightning's early stopping, whose patience at a resume is the one that is asked for.

    It says why it stopped: Lightning's is silent unless it also tells every improvement.

    Args:
        monitor: the metric that has to improve.
        patience: validations without an improvement after which it stops.
        mode: whether the metric should be small or large; None of a loss.
        further: other arguments of Lightning's.
    """

    @checked
    def __init__(
        self,
        monitor: Name,
        *,
        patience: CountOrZero = 3,
        mode: Mode | None = None,
        **further: Any,
    ) -> None:
        super().__init__(monitor, patience=patience, mode=mode_of(monitor, mode), **further)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the metric, and name what stops the run when it first does."""
        before = self.stopping_reason_message
        super().on_validation_end(trainer, pl_module)
        reason = self.stopping_reason_message
        if reason is not None and reason != before and trainer.is_global_zero:
            said = reason.removesuffix(" Signaling Trainer to stop.")
            logger.warning("early stopping at iteration %d: %s", current_iteration(trainer), said)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the best value and how long ago it was; with more patience it has not stopped."""
        if state_dict["patience"] != self.patience:
            log_changed("callbacks.early_stopping.patience", self.patience, state_dict["patience"])
        super().load_state_dict(state_dict | {"patience": self.patience})
        exhausted = self.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
        if exhausted and self.wait_count < self.patience:
            self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
            self.stopping_reason_message = None
