"""Fit a run in a folder of its own, from its newest checkpoint where there is one.

The fit may end as soon as given detectors have fired.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from rlhf_lightning.callbacks.doctor.callback import Doctor

if TYPE_CHECKING:
    from rlhf_lightning.app.config.settings import TrainSettings

SAVING = ("callbacks.checkpoint.every_n_iterations=2", "callbacks.checkpoint.keep_last=1")


class StopWhenNoticed(Callback):
    """Ends the fit when all of some detectors have fired."""

    def __init__(self, detectors: Sequence[str]) -> None:
        self.detectors = set(detectors)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Stop when every detector has fired."""
        doctor = next(each for each in trainer.callbacks if isinstance(each, Doctor))
        if self.detectors and self.detectors <= {event.name for event in raised(doctor)}:
            trainer.should_stop = True


def raised(doctor: Doctor) -> list[Any]:
    """Return the alerts that were raised."""
    return [e for e in doctor.alert_log.events if e.kind == "alert" and e.level != "healthy"]


def study_settings(overrides: Sequence[str]) -> TrainSettings:
    """Return the settings of a run, which may name classes of the studies."""
    from rlhf_lightning.app.config.compose import register
    from rlhf_lightning.app.config.settings import TrainSettings
    from rlhf_lightning.app.config.validate import load_settings

    os.environ.setdefault("RLHF_ALLOWED_TARGETS", "benchmarks.studies.")
    register()
    return load_settings(TrainSettings, "train", list(overrides))


def fitted(settings: TrainSettings, path: Path, until: Sequence[str] = ()) -> tuple[Any, float]:
    """Train what `settings` describe in the run folder `path`, or the rest of it.

    Args:
        settings: of a PPO run.
        path: of its folder.
        until: detectors; the fit ends when all of them have fired. None: it runs to its end.

    Returns:
        The parts of the run, and the processor time of all its pieces in seconds.
    """
    import lightning as L

    from rlhf_lightning.app.build import assemble
    from rlhf_lightning.runs.folder import RunFolder
    from rlhf_lightning.runs.resume import newest_complete_checkpoint

    folder = RunFolder(path).create()
    spent, started = path / "cpu_seconds", time.process_time()
    before = float(spent.read_text()) if spent.exists() else 0.0
    L.seed_everything(settings.seed, workers=True, verbose=False)
    parts = assemble(settings, folder)
    # Before the checkpoint callback, which saves where the fit is about to stop.
    place = next(i for i, c in enumerate(parts.trainer.callbacks) if isinstance(c, Doctor)) + 1
    parts.trainer.callbacks.insert(place, StopWhenNoticed(until))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            parts.trainer.fit(
                parts.module,
                datamodule=parts.data,
                ckpt_path=newest_complete_checkpoint(folder),
                weights_only=True,
            )
    finally:
        seconds = before + time.process_time() - started
        spent.write_text(str(seconds))
    return parts, seconds
