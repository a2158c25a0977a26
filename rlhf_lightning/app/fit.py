"""One stage's training, which the doctor may end early or send back to an earlier checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rlhf_lightning.app.build import assemble
from rlhf_lightning.app.failures import watch_children
from rlhf_lightning.app.stages.spec import TrainingComponents
from rlhf_lightning.callbacks.doctor.alert_log import EndRequest
from rlhf_lightning.callbacks.doctor.callback import Doctor, write_handover
from rlhf_lightning.callbacks.wandb_content import early_end_alerted, wandb_loggers
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.stopping import RunStoppedError
from rlhf_lightning.runs.summary import Summary

logger = logging.getLogger(__name__)


def fit(
    folder: RunFolder, parts: TrainingComponents, checkpoint: Path | None, summary: Summary
) -> TrainingComponents:
    """Train to the end; where the doctor rolls back, train on from there with its changes.

    Args:
        folder: of the run.
        parts: of the first fit.
        checkpoint: to continue; None starts anew.
        summary: as it stands while the run is under way.

    Returns:
        The parts of the last fit, which hold the trained models.

    Raises:
        RunStoppedError: on every rank, if the doctor stops the run.
    """
    while True:
        watch_children(parts.trainer, folder, summary)
        _fit_once(parts, checkpoint)
        doctor = doctor_of(parts.trainer)
        if doctor is None or doctor.request is None:
            return parts
        request = doctor.request
        if request.kind == "stop" or request.checkpoint is None:
            with early_end_alerted(parts.trainer):
                raise RunStoppedError(_stopped(parts, folder, request))
        checkpoint = folder.checkpoints / f"iteration={request.checkpoint:06d}.ckpt"
        if parts.trainer.is_global_zero:
            write_handover(folder, doctor.hand_over(request.checkpoint))
        logger.warning("doctor: a new fit starts from %s", checkpoint.name)
        for tracker in wandb_loggers(parts.trainer):
            tracker.finish()  # W&B refuses to open a run a second time
        parts.trainer = parts.module = None  # type: ignore[assignment]  # their memory is needed
        del doctor
        parts = assemble(parts.settings, folder)


def _stopped(parts: TrainingComponents, folder: RunFolder, request: EndRequest) -> str:
    """Return the reason of the stop, the remedy, and how to go on all the same."""
    doctor = parts.settings.doctor
    actions = None if doctor is None else doctor.actions
    patience = 0 if actions is None else actions.alarm_patience
    return (
        f"the doctor, after iteration {request.iteration}: {request.reason}. What helps: "
        f"{request.remedy}. To go on from here with other settings, give them with "
        f"ckpt_path={folder.last_checkpoint} (doctor.actions.on_alarm=none goes on whatever the "
        "alarm); as it is, it goes on too, and stops if the alarm stays for "
        f"{patience} iterations more"
    )


def doctor_of(trainer: Any) -> Doctor | None:
    """Return the doctor among a Trainer's callbacks."""
    return next((c for c in trainer.callbacks if isinstance(c, Doctor)), None)


def _fit_once(parts: TrainingComponents, checkpoint: Path | None) -> None:
    try:
        parts.trainer.fit(
            parts.module, datamodule=parts.data, ckpt_path=checkpoint, weights_only=True
        )
    except SystemExit as error:  # what Lightning makes of an interrupt
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
