"""Arguments for `L.Trainer`: our callbacks, checkpoints, metrics and report, in one run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint

from rlhf_lightning.arguments import Count, PathOrName, checked
from rlhf_lightning.callbacks.checkpointing import AtomicCheckpointIO, IterationCheckpoint
from rlhf_lightning.callbacks.console import ProgressBar
from rlhf_lightning.callbacks.metrics_log import MetricsLog
from rlhf_lightning.callbacks.random_state import RandomState
from rlhf_lightning.callbacks.run_record import LastCheckpoint, RunRecord
from rlhf_lightning.callbacks.samples import SampleLog
from rlhf_lightning.runs.folder import RunFolder


@checked
def trainer_arguments(
    folder: PathOrName,
    *,
    max_iterations: Count | None = None,
    checkpoint_every_n_iterations: Count = 20,
    samples_every_n_iterations: Count = 10,
    callbacks: Callback | Sequence[Callback] | None = None,
    **trainer: Any,
) -> dict[str, Any]:
    """Return keyword arguments for `L.Trainer` with which a stage is one run in `folder`.

    The folder gets `metrics.csv` (a row an iteration), `samples.jsonl`, checkpoints that no kill
    can damage, `summary.json` and `report.html`. `fit(..., ckpt_path="last")` goes on bit for bit
    from its newest checkpoint.

    Args:
        folder: of the run; a second run into it without `ckpt_path="last"` is refused.
        max_iterations: batches to train on. It reaches the Trainer, the schedule and a DataModule
            that was given neither `num_iterations` nor `num_epochs`; None leaves it to that one.
        checkpoint_every_n_iterations: how often a checkpoint is written; the last one always is.
        samples_every_n_iterations: how often PPO's samples are written.
        callbacks: one, or several, behind ours.
        trainer: any other argument of `L.Trainer`; these win.
    """
    run = RunFolder(Path(folder))
    ours: list[Callback] = [
        RunRecord(run),
        RandomState(),
        SampleLog(run, every_n_iterations=samples_every_n_iterations),
        LastCheckpoint(run),
        IterationCheckpoint(run.checkpoints, every_n_iterations=checkpoint_every_n_iterations),
    ]
    if trainer.get("enable_progress_bar", True):
        ours.append(ProgressBar())
    given = [callbacks] if isinstance(callbacks, Callback) else callbacks or []
    if trainer.get("enable_checkpointing", True) is False:
        ours = [callback for callback in ours if not isinstance(callback, Checkpoint)]
    return {
        "max_epochs": 1,
        "limit_train_batches": max_iterations,
        # The log behind all that log; Lightning puts the checkpoints behind it.
        "callbacks": [*ours, *given, MetricsLog(run)],
        "plugins": [AtomicCheckpointIO(), *_listed(trainer.pop("plugins", None))],
        "logger": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "use_distributed_sampler": False,
        "enable_model_summary": False,
        "default_root_dir": run.path,
        **trainer,
    }


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
