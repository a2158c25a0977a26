"""One stage's training, which the doctor may end early or send back to an earlier checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rlhf_lightning.assembly import Parts, assemble
from rlhf_lightning.callbacks.doctor.callback import Doctor
from rlhf_lightning.callbacks.doctor.chart import Handover
from rlhf_lightning.lost_ranks import watch_children
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.stopping import RunStoppedError
from rlhf_lightning.runs.summary import Summary

logger = logging.getLogger(__name__)


def fit(
    cfg: DictConfig, folder: RunFolder, parts: Parts, checkpoint: Path | None, summary: Summary
) -> Parts:
    """Train to the end; where the doctor rolls back, train on from there with its changes.

    Args:
        cfg: of the run.
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
            raise RunStoppedError(
                f"the doctor, after iteration {request.iteration}: {request.reason}"
            )
        checkpoint = folder.checkpoints / f"iteration={request.checkpoint:06d}.ckpt"
        practice = doctor.practice
        handover = Handover(tuple(doctor.record.events), practice.rollbacks, practice.held)
        logger.warning("doctor: a new fit starts from %s", checkpoint.name)
        parts.trainer = parts.module = None  # type: ignore[assignment]  # their memory is needed
        parts = assemble(cfg, folder)
        again = doctor_of(parts.trainer)
        assert again is not None  # the configuration is the same
        again.record.taken_over = handover


def doctor_of(trainer: Any) -> Doctor | None:
    """Return the doctor among a Trainer's callbacks."""
    return next((c for c in trainer.callbacks if isinstance(c, Doctor)), None)


def _fit_once(parts: Parts, checkpoint: Path | None) -> None:
    try:
        parts.trainer.fit(
            parts.module, datamodule=parts.data, ckpt_path=checkpoint, weights_only=True
        )
    except SystemExit as error:  # what Lightning makes of an interrupt
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
