"""The iteration under way: its number, its fresh metrics, and whether a validation follows.

An iteration is one training batch. Lightning's `global_step` counts optimizer steps, several an
iteration, and is not used. This is the only file of the callbacks that reads Lightning's loops.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer

VALIDATION = "val/"


class Validations(Callback):
    """Spread validations evenly over the iterations of a run, the last one at its end.

    Args:
        count: number of validations; 0 for none.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the interval, now that the data know how many iterations there are."""
        if stage != "fit":
            return
        data: Any = getattr(trainer, "datamodule", None)
        if not self.count:
            trainer.limit_val_batches = 0
        elif hasattr(data, "num_iterations"):  # of other data Lightning alone knows the length
            trainer.val_check_interval = max(min(_planned(trainer)) // self.count, 1)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Have the last iteration validated too, where the interval does not divide the run."""
        if self.count and current_iteration(trainer) == last_iteration(trainer):
            trainer.val_check_batch = 1


def writes(trainer: Trainer) -> bool:
    """Return True on the rank that writes the run folder; `fast_dev_run` leaves nothing behind."""
    return trainer.is_global_zero and not cast(Any, trainer).fast_dev_run


def current_iteration(trainer: Trainer) -> int:
    """Return the iteration under way or just done, counted from 1; 0 before the first.

    It is right in every training and validation hook, and after a checkpoint was loaded.
    """
    return trainer.fit_loop.epoch_loop.total_batch_idx + 1


def last_iteration(trainer: Trainer) -> int:
    """Return the number of iterations the run is going to have."""
    batches = int(trainer.num_training_batches)
    epochs = trainer.max_epochs
    return batches * epochs if epochs is not None and epochs > 0 else batches


def is_last_iteration(trainer: Trainer) -> bool:
    """Return whether the run ends with the iteration that is just done, also by `max_steps`."""
    by_steps = 0 < trainer.max_steps <= trainer.global_step
    return by_steps or current_iteration(trainer) == last_iteration(trainer)


def out_of_time(trainer: Trainer) -> bool:
    """Return whether `max_time` of the Trainer ends the run before its last iteration."""
    timer = next((c for c in trainer.callbacks if isinstance(c, Timer)), None)  # type: ignore[attr-defined]
    if timer is None or not trainer.should_stop:
        return False
    left, ends = timer.time_remaining(), current_iteration(trainer) >= last_iteration(trainer)
    return left is not None and left <= 0 and not ends


def _planned(trainer: Trainer) -> list[int]:
    """Return the batches of a fit by its Trainer and by its data, where they say how many."""
    limit = trainer.limit_train_batches
    data: Any = getattr(trainer, "datamodule", None)
    given = [limit] if isinstance(limit, int) else []
    return [*given, data.num_iterations] if hasattr(data, "num_iterations") else given


def reopen_epoch(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Let a longer run continue a finished one, in `on_load_checkpoint`.

    Lightning stores that the last batch of a run was the last of its epoch, and would silently
    train nothing more.
    """
    planned = _planned(trainer)
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    progress = loops.get("epoch_loop.batch_progress")
    if progress is not None and planned and progress["current"]["ready"] < min(planned):
        progress["is_last_batch"] = False


def number_for_loggers(trainer: Trainer) -> None:
    """Let loggers have the number of this iteration, in `on_train_batch_start`.

    After a checkpoint that was written in a validation Lightning is one behind for ever, unless the
    run that continues it validates there, too: one of another length need not.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = current_iteration(trainer) - 1


def validates(trainer: Trainer) -> bool:
    """Return whether Lightning validates at all, now that training begins.

    It calls no hook of a validation that has no batch, as where no row is held out.
    """
    loop = trainer.fit_loop.epoch_loop
    is_empty = loop.val_loop._combined_loader is not None and loop.val_loop.skip
    return bool(loop._should_check_val_epoch()) and not is_empty


def validation_follows(trainer: Trainer) -> bool:
    """Return whether Lightning validates after this iteration; for `on_train_batch_end`."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    return bool(trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)) and validates(trainer)


def fresh_metrics(trainer: Trainer) -> dict[str, float]:
    """Return what the training batch, or in a validation hook the validation, has just logged.

    `trainer.callback_metrics` also holds the last validation's values, long after it ran.
    """
    logged = trainer._logger_connector.metrics["callback"]
    return {k: v.item() if isinstance(v, torch.Tensor) else float(v) for k, v in logged.items()}
