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
import time
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.plugins.io import TorchCheckpointIO

from rlhf_lightning.arguments import Above0, Count, checked
from rlhf_lightning.callbacks.iterations import (
    VALIDATION,
    current_iteration,
    fresh_metrics,
    is_last_iteration,
    last_iteration,
    out_of_time,
    reopen_epoch,
    validates,
    validation_follows,
)
from rlhf_lightning.data.record_datamodule import RecordDataModule
from rlhf_lightning.distributed.checkpoint import read_full
from rlhf_lightning.distributed.collectives import agreed_max, rank
from rlhf_lightning.modules.checkpoint_state import log_changed
from rlhf_lightning.runs.atomic import link_atomically, remove, replacing, take_along
from rlhf_lightning.runs.lock import FolderTakenError
from rlhf_lightning.runs.metric_catalog import duration
from rlhf_lightning.runs.resume import checkpoint_iteration, checkpoint_problem, newest_complete_in
from rlhf_lightning.runs.stopping import (
    STOP_SIGNALS,
    RunStoppedError,
    SaveClock,
    SignalWatch,
    deadline,
)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint file in one step, read back and on disk before it takes its name.

    It reads sharded checkpoints too, so that a run can continue under another strategy.

    Lightning pickles into memory and then moves a file from `$TMPDIR`; across filesystems that is a
    plain copy, and a kill destroys the former file too. Only rank 0 calls it.
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


# The larger, the more it asks for; what one rank says is done by all.
_SAVE, _DEADLINE, _MAX_TIME = 1, 2, 3
_SIGNALS = {number: code for code, number in enumerate(STOP_SIGNALS, start=4)}


class SaveRequest(NamedTuple):
    """The request that the ranks agreed on at the end of an iteration.

    Args:
        save: save now, even if nothing is due.
        stop: reason to stop once it is saved; None to continue.
    """

    save: bool = False
    stop: str | None = None


logger = logging.getLogger(__name__)

_SHOULD_STOP = "rlhf_lightning.should_stop"


class IterationCheckpoint(Checkpoint):
    """Save every few iterations or minutes, at the last one, when asked to stop, and the best.

    The folder holds `iteration=000012.ckpt` files, the link `last.ckpt` to the newest and, with a
    `monitor`, the link `best.ckpt`. A link changes its target in one step, before its former target
    is deleted, so `last.ckpt` is never dangling.

    SIGTERM, SIGUSR1, the deadline and the Trainer's `max_time` end the run with `RunStoppedError`
    after the current iteration and its checkpoint, on all ranks, whichever of them got the signal.

    Args:
        dirpath: folder of the checkpoints, `RunFolder.checkpoints`.
        every_n_iterations: how often to save; None leaves it to `every_minutes`.
        every_minutes: minutes after the last save at which to save again; None for no such rule.
        must_save_by: time by which the last checkpoint must be on disk: `3h50m` after the start, a
            moment in ISO format, or `slurm` for the end of the job. None for no deadline.
        keep_last: how many of the newest to keep, not counting the best.
        monitor: the metric of the best checkpoint, None for no best. One of the validation, e.g.
            `val/loss`, is compared after each validation, another one at each save.
        mode: whether the metric should be small or large.
        started: start of the process, in seconds since 1970; None for now.

    Raises:
        ValueError: for a number below 1, an unknown mode or a malformed deadline.
    """

    @checked
    def __init__(
        self,
        dirpath: Path | str,
        *,
        every_n_iterations: Count | None = 10,
        every_minutes: Above0 | None = None,
        must_save_by: str | None = None,
        keep_last: Count = 2,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        started: float | None = None,
    ) -> None:
        self.dirpath = Path(dirpath)
        self.every_n_iterations = every_n_iterations
        self.keep_last = keep_last
        self.monitor = monitor
        self.mode = mode
        self.best_model_score: float | None = None
        self.best_iteration: int | None = None
        self._former_bests: list[int] = []  # iterations, which kept checkpoints may name
        end = None
        if must_save_by is not None:
            try:
                end = deadline(must_save_by, started=started or time.time())
            except ValueError as error:
                raise ValueError(f"IterationCheckpoint.must_save_by={error}") from error
        self.clock = SaveClock(every_minutes=every_minutes, deadline=end)
        self._signals = SignalWatch(self._when)
        self._asked = SaveRequest()
        self._logged: dict[str, float] = {}  # what the monitored metric is one of
        self._should_stop = self._stopped_early = False
        self._saved_at = 0
        self._dry = False

    @property
    def best_model_path(self) -> str:
        """The path of the best checkpoint, "" if there is none."""
        return "" if self.best_iteration is None else str(self._path(self.best_iteration))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note whether this is a dry run, which saves nothing.

        Raises:
            ValueError: if the monitored metric is of a validation, and there is none.
        """
        self._dry = bool(getattr(trainer, "fast_dev_run", False))
        silence_resume_warnings()
        if stage == "fit":
            self._check_validation(trainer.limit_val_batches != 0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take up where the checkpoint left off, and drop what was written after it.

        Raises:
            FileNotFoundError: on every rank, if early stopping needs a best checkpoint that is
                neither here nor beside the one that is continued.
            FolderTakenError: on every rank, if a new run would remove checkpoints of another.
            ValueError: if the monitored metric is of a validation, and no row is held out.
        """
        self._check_validation(validates(trainer))
        self._saved_at = start = current_iteration(trainer)
        trainer.should_stop = trainer.should_stop or self._stays_stopped(trainer)
        if start and not isinstance(getattr(trainer, "datamodule", None), RecordDataModule):
            logger.warning(
                "the run continues after iteration %d, and its loader may begin at its first batch "
                "again: give fit(module, datamodule=...) a DataModule of rlhf_lightning",
                start,
            )
        self.clock.start()
        self._signals.start()
        if self._dry:
            self.best_model_score = self.best_iteration = None
            return
        found = newest_complete_in(self.dirpath) if trainer.is_global_zero and not start else None
        if (taken := trainer.strategy.broadcast(found)) is not None:
            raise FolderTakenError(
                f"the folder {self.dirpath} holds the checkpoints of another run, e.g. "
                f"{taken.name}: continue it with ckpt_path={taken}, or choose another folder"
            )
        if self.best_iteration is not None:  # first: a run that is refused has deleted nothing
            self._copy_best(trainer, start, self.best_iteration)
        if trainer.is_global_zero:
            self._drop_after(start)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save, unless a validation belongs to this iteration: then wait for it.

        Raises:
            RunStoppedError: on every rank, if the run was asked to stop; it is saved.
            ValueError: if the monitored metric was not logged; it is saved.
        """
        if self.monitor is not None:
            self._logged = fresh_metrics(trainer)
        if not validation_follows(trainer):
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
        """Give the signals back."""
        self._signals.stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Give the signals back."""
        self._signals.stop()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember that early stopping has decided; Lightning forgets it.

        A callback with `ends_fit`, as the doctor has, decides at a resume by its own state.
        """
        callbacks: list[Any] = cast(Any, trainer).callbacks
        own = any(getattr(callback, "ends_fit", False) for callback in callbacks)
        checkpoint[_SHOULD_STOP] = (
            bool(trainer.should_stop) and not own and not out_of_time(trainer)
        )

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take that decision over, and note whether it was early stopping that took it."""
        reopen_epoch(trainer, checkpoint)
        self._should_stop = bool(checkpoint.get(_SHOULD_STOP, False))
        states = checkpoint.get("callbacks", {}).values()
        self._stopped_early = any(
            isinstance(state, dict) and bool(state.get("stopping_reason")) for state in states
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what the best is so far, by which metric, and the bests before it."""
        return {
            "best_model_score": self.best_model_score,
            "best_iteration": self.best_iteration,
            "former_bests": list(self._former_bests),
            "monitor": self.monitor,
            "mode": self.mode,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what the best was, unless it was the best by another metric."""
        own = (self.monitor, self.mode)
        saved = (state_dict.get("monitor", self.monitor), state_dict.get("mode", self.mode))
        if own != saved:
            log_changed("IterationCheckpoint.monitor, mode", own, saved)
            return
        self.best_model_score = state_dict["best_model_score"]
        self.best_iteration = state_dict["best_iteration"]
        self._former_bests = list(state_dict.get("former_bests", []))

    def _when(self) -> str:
        """Return when a signal stops the run; the first rank says it."""
        took = self.clock.longest_iteration
        most = f", which takes up to {duration(took)}" if took else ""
        return "" if rank() else f"the run stops, with a checkpoint, after this iteration{most}"

    def _agreed(self, trainer: Trainer) -> SaveRequest:
        """Return what at least one rank asks for; every rank calls it equally often."""
        if self._signals.received is not None:
            own = _SIGNALS[self._signals.received]
        elif self.clock.must_stop():
            own = _DEADLINE
        elif out_of_time(trainer):
            own = _MAX_TIME
        else:
            own = _SAVE if self.clock.save_is_due() else 0
        code = agreed_max(own, trainer.strategy.root_device)
        if code <= _SAVE:
            return SaveRequest(save=code == _SAVE)
        if code == _MAX_TIME:
            return SaveRequest(save=True, stop="max_time of the Trainer is over")
        if code == _DEADLINE and self.clock.deadline is not None:
            moment = datetime.fromtimestamp(self.clock.deadline).isoformat(" ", "seconds")
            return SaveRequest(save=True, stop=f"another iteration could last beyond {moment}")
        names = {value: number.name for number, value in _SIGNALS.items()}
        return SaveRequest(save=True, stop=names[code])

    def _drop_after(self, start: int) -> None:
        for unfinished in self.dirpath.glob(".iteration=*.tmp-*"):  # what a kill left behind
            remove(unfinished)
        later = [path for path in self._files() if (checkpoint_iteration(path) or 0) > start]
        if later:
            self._relink("last.ckpt", start)
            if self.best_iteration is not None:
                self._relink("best.ckpt", self.best_iteration)
        for path in later:
            logger.warning("removing %s: the run continues from iteration %d", path, start)
            remove(path)
        best = self.dirpath / "best.ckpt"
        if best.is_symlink() and not best.exists():
            best.unlink()

    def _stays_stopped(self, trainer: Trainer) -> bool:
        """Return whether the fit that had ended stays so; not where there is more patience now."""
        if not (self._should_stop and self._stopped_early):
            return self._should_stop
        reasons = [stop.stopping_reason for stop in trainer.early_stopping_callbacks]
        return any(reason is not EarlyStoppingReason.NOT_STOPPED for reason in reasons)

    def _copy_best(self, trainer: Trainer, start: int, best: int) -> None:
        """Copy the best checkpoint here; the continued one may be in another folder."""
        problem = self._copied(trainer, start, best) if trainer.is_global_zero else None
        problem = trainer.strategy.broadcast(problem)
        if problem is None:
            return
        lost = f"the best checkpoint so far, that of iteration {best}, cannot be kept: {problem}"
        if trainer.early_stopping_callbacks:
            raise FileNotFoundError(
                f"{lost}, and early stopping would end with other weights: copy it there, or "
                "disable callbacks.early_stopping"
            )
        if trainer.is_global_zero:
            logger.warning("%s; the next one counts as the best", lost)
        self.best_model_score = self.best_iteration = None

    def _copied(self, trainer: Trainer, start: int, best: int) -> str | None:
        """Return why the best checkpoint is not here; copy it if it is next to the start."""
        if self._path(best).exists():
            return None
        source = Path(trainer.ckpt_path or "").resolve()
        kept = source if best == start else source.with_name(self._path(best).name)
        if problem := checkpoint_problem(kept):
            return f"{kept}: {problem}"
        try:
            # The start comes first: a kill in between must not leave the best as the newest.
            for name, iteration, origin in (("last", start, source), ("best", best, kept)):
                if not self._path(iteration).exists():
                    take_along(origin, self._path(iteration))
                self._relink(f"{name}.ckpt", iteration)
        except OSError as error:
            return str(error)
        return None

    @property
    def _waits_for_validation(self) -> bool:
        return self.monitor is not None and self.monitor.startswith(VALIDATION)

    def _check_validation(self, validates: bool) -> None:
        if self._waits_for_validation and not validates:
            raise ValueError(
                f"IterationCheckpoint.monitor={self.monitor!r}, but this run does not validate: "
                "monitor what training logs, e.g. rollout/score, or null; or hold rows out "
                "(validation_fraction) and validate them"
            )

    def _end_iteration(self, trainer: Trainer, *, best: bool) -> None:
        self.clock.end_iteration()  # with its validation: another one must fit before the deadline
        self._asked = self._agreed(trainer)
        due = self._due(trainer)
        # A metric of training is compared where a checkpoint is due anyway: there is one for each
        # iteration, and hardly any would not be the best for a while.
        compares = best and (self._waits_for_validation or due)
        unknown = compares and not self._dry and self.monitor not in (None, *self._logged)
        if compares and not unknown:
            due = self._take_best(trainer) or due
        if due or unknown:
            self._save(trainer)
        if unknown:
            raise ValueError(
                f"IterationCheckpoint.monitor={self.monitor!r} was not logged; iteration "
                f"{self._saved_at} is saved, continue from it with one of "
                f"{', '.join(sorted(self._logged)) or 'no metrics'}, or null"
            )
        if self._asked.stop is not None and not self._dry:
            raise RunStoppedError(
                f"{self._asked.stop}: saved after iteration {self._saved_at} of "
                f"{last_iteration(trainer)}"
            )

    def _due(self, trainer: Trainer) -> bool:
        iteration, every = current_iteration(trainer), self.every_n_iterations
        final = is_last_iteration(trainer) or trainer.should_stop
        regular = every is not None and iteration % every == 0
        return not self._dry and (regular or final or self._asked.save)

    def _take_best(self, trainer: Trainer) -> bool:
        if self.monitor is None or self._dry:
            return False
        score = self._logged[self.monitor]
        best = self.best_model_score
        better = best is None or (score < best if self.mode == "min" else score > best)
        better = trainer.strategy.reduce_boolean_decision(better and not math.isnan(score))
        if better:
            if self.best_iteration is not None:
                self._former_bests.append(self.best_iteration)
            self.best_model_score, self.best_iteration = score, current_iteration(trainer)
        return better

    def _save(self, trainer: Trainer) -> None:
        iteration = current_iteration(trainer)
        with self.clock.saving():
            trainer.save_checkpoint(self._path(iteration), weights_only=False)
            self._saved_at = iteration
            if trainer.is_global_zero:
                self._relink("last.ckpt", iteration)
                if self.best_iteration is not None:
                    self._relink("best.ckpt", self.best_iteration)
                needed = self._needed_bests()
                for path in self._files()[: -self.keep_last]:
                    if checkpoint_iteration(path) not in needed:
                        remove(path)
            trainer.strategy.barrier("IterationCheckpoint._save")

    def _needed_bests(self) -> set[int]:
        """Return the best and those that were the best when a kept checkpoint was written."""
        bests = [i for i in (*self._former_bests, self.best_iteration) if i is not None]
        oldest = checkpoint_iteration(self._files()[-self.keep_last :][0]) or 0
        since = max((i for i in bests if i <= oldest), default=0)
        return {i for i in bests if i >= since}

    def _relink(self, name: str, iteration: int) -> None:
        if self._path(iteration).exists():
            link_atomically(self.dirpath / name, self._path(iteration))

    def _files(self) -> list[Path]:
        return sorted(self.dirpath.glob("iteration=*.ckpt")) if self.dirpath.is_dir() else []

    def _path(self, iteration: int) -> Path:
        return self.dirpath / f"iteration={iteration:06d}.ckpt"
