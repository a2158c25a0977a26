"""One stage's training, which the doctor may end early or send back to an earlier checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from rlhf_lightning.app.build import assemble
from rlhf_lightning.app.stages.spec import TrainingComponents
from rlhf_lightning.callbacks.doctor.callback import Doctor, write_handover
from rlhf_lightning.callbacks.wandb_content import wandb_loggers
from rlhf_lightning.runs.folder import RunFolder

logger = logging.getLogger(__name__)


class DropsOptimizerState(Checkpoint):
    """Drops gradients and optimizer state when training has ended.

    Lightning would move the state to host memory, twice the size of the trained weights. It is a
    checkpoint callback because Lightning calls those last: what they save has the state.
    """

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop them."""
        for optimizer in trainer.optimizers:
            optimizer.zero_grad(set_to_none=True)
            optimizer.state.clear()


def fit(
    folder: RunFolder, parts: TrainingComponents, checkpoint: Path | None
) -> TrainingComponents:
    """Train to the end; after a rollback of the doctor, continue from there with its changes.

    Args:
        folder: folder of the run.
        parts: parts of the first fit.
        checkpoint: checkpoint to continue; None starts from the beginning.

    Returns:
        The parts of the last fit, which hold the trained models.

    Raises:
        RunStoppedError: on every rank, if the doctor stops the run.
    """
    while True:
        _fit_once(parts, checkpoint)
        doctor = doctor_of(parts.trainer)
        if doctor is None or doctor.request is None:
            return parts
        back = doctor.request.checkpoint
        assert back is not None  # else the fit ended with a RunStoppedError
        checkpoint = folder.checkpoints / f"iteration={back:06d}.ckpt"
        if parts.trainer.is_global_zero:
            write_handover(folder, doctor.hand_over(back))
        logger.warning("doctor: a new fit starts from %s", checkpoint.name)
        for tracker in wandb_loggers(parts.trainer):
            tracker.finish()  # W&B refuses to open a run a second time
        parts.trainer = parts.module = None  # type: ignore[assignment]  # their memory is needed
        del doctor
        parts = assemble(parts.settings, folder)


def doctor_of(trainer: Any) -> Doctor | None:
    """Return the doctor among a Trainer's callbacks."""
    return next((c for c in trainer.callbacks if isinstance(c, Doctor)), None)


def _fit_once(parts: TrainingComponents, checkpoint: Path | None) -> None:
    trainer: Any = parts.trainer
    trainer.callbacks.append(DropsOptimizerState())
    try:
        parts.trainer.fit(
            parts.module, datamodule=parts.data, ckpt_path=checkpoint, weights_only=True
        )
    except SystemExit as error:  # what Lightning makes of an interrupt
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
