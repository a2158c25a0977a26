"""Arguments for `L.Trainer`: our callbacks, checkpoints, metrics and report, in one run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.callbacks import ProgressBar as AnyProgressBar
from lightning.pytorch.loggers import Logger

from rlhf_lightning.arguments import Count, CountOrZero, Line, PathOrName, checked
from rlhf_lightning.callbacks import checkpointing
from rlhf_lightning.callbacks.console import ProgressBar
from rlhf_lightning.callbacks.doctor.callback import Doctor
from rlhf_lightning.callbacks.exact_resume import RandomState, SameRewards
from rlhf_lightning.callbacks.iterations import Validations
from rlhf_lightning.callbacks.periodic_evaluation import PeriodicEvaluation
from rlhf_lightning.callbacks.run_record import LastCheckpoint, RunRecord, RunStart
from rlhf_lightning.callbacks.run_tables import MetricsLog, SampleLog, SaveFaultyBatch
from rlhf_lightning.callbacks.tensorboard_logger import tensorboard_logger
from rlhf_lightning.callbacks.wandb_logger import WandbContent, wandb_logger
from rlhf_lightning.models.quiet import quieten
from rlhf_lightning.runs.folder import RunFolder

STOPS_BY = "val/loss"  # early stopping


@checked
def trainer_arguments(
    folder: PathOrName,
    *,
    max_iterations: Count | None = None,
    validations: CountOrZero = 4,
    checkpoint_every_n_iterations: Count | None = 20,
    checkpoint: Mapping[str, Any] | None = None,
    samples_every_n_iterations: Count = 10,
    num_samples: Count = 8,
    doctor: bool | Mapping[str, Any] = True,
    early_stopping: Count | Mapping[str, Any] | None = None,
    logger: str | bool | Logger | Sequence[Logger] | None = False,
    callbacks: Callback | Sequence[Callback] | None = None,
    record: bool = True,
    name: Line = "train",
    **trainer: Any,
) -> dict[str, Any]:
    """Return keyword arguments for `L.Trainer` with which a stage is one run in `folder`.

    The folder gets `metrics.csv` (a row an iteration), `samples.jsonl`, checkpoints that no kill
    can damage, the batch that a non-finite value stopped the run at, `summary.json` and
    `report.html`, whose place is on the last screen if the Trainer shows progress.
    `fit(..., ckpt_path="last")` continues bit for bit from its newest checkpoint. What Lightning
    and transformers say in every run is silenced.

    Args:
        folder: folder of the run; a second run into it without `ckpt_path="last"` is refused.
        max_iterations: batches to train on. It reaches the Trainer, the schedule and a DataModule
            that was given neither `num_iterations` nor `num_epochs`; None leaves it to that one.
        validations: how often SFT, a reward model and DPO are validated, at even distances.
        checkpoint_every_n_iterations: how often a checkpoint is written; the last one always is.
        checkpoint: further arguments of `IterationCheckpoint`, such as `monitor` and `keep_last`.
        samples_every_n_iterations: how often PPO's samples are written.
        num_samples: number of samples each time.
        doctor: watches the rollouts of PPO, GRPO and their relatives; False for none, or
            arguments of `Doctor`, such as `{"preflight": True}`.
        early_stopping: validations without a lower `val/loss` after which training ends, or
            arguments of Lightning's `EarlyStopping`. The run ends with its best weights.
        logger: `"wandb"` or `"tensorboard"` for ours, or any of Lightning's.
        callbacks: one, or several, behind ours.
        record: write `summary.json` and `report.html`, and refuse to run over another run.
        name: name of the run, shown before the progress bar.
        trainer: any other argument of `L.Trainer`; these win.

    Raises:
        ValueError: for an unknown logger, early stopping without checkpoints, whose best weights
            would be lost, or a doctor that goes back to an earlier checkpoint, which needs a new
            Trainer: `rlhf-train doctor=act` makes one.
    """
    quieten(news=True)
    keeps = trainer.get("enable_checkpointing", True) is not False
    run, given = RunFolder(Path(folder)), _listed(callbacks)
    saving = {"every_n_iterations": checkpoint_every_n_iterations, **(checkpoint or {})}
    samples = {"every_n_iterations": samples_every_n_iterations, "num_samples": num_samples}
    ours = [
        *([RunStart(kept := RunRecord(run))] if record else []),
        SaveFaultyBatch(run),
        *(callback for callback in given if isinstance(callback, PeriodicEvaluation)),
        *_doctor(run, doctor, record),
        *([kept, LastCheckpoint(run)] if record else []),
        *(RandomState(), SameRewards()),
        *([] if "val_check_interval" in trainer else [Validations(validations)]),
        *_saving(run, saving, early_stopping, keeps=keeps),
        *(WandbContent(**samples), SampleLog(run, **samples)),
        *([ProgressBar(name)] if _shows_progress(given, trainer) else []),
        *(callback for callback in given if not isinstance(callback, PeriodicEvaluation)),
        MetricsLog(run),  # behind all that log; Lightning puts the checkpoints behind it
    ]
    return {
        "max_epochs": 1,
        "limit_train_batches": max_iterations,
        "callbacks": [one for one in ours if keeps or not isinstance(one, Checkpoint)],
        "plugins": [checkpointing.AtomicCheckpointIO(), *_listed(trainer.pop("plugins", None))],
        "logger": _logger(run, logger) if isinstance(logger, str) else logger,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "use_distributed_sampler": False,
        "enable_model_summary": False,
        "default_root_dir": run.path,
        **trainer,
    }


def _shows_progress(given: Sequence[Callback], trainer: Mapping[str, Any]) -> bool:
    """Return True unless there is none, or one of the user's own: Lightning takes one alone."""
    own = any(isinstance(callback, AnyProgressBar) for callback in given)
    return bool(trainer.get("enable_progress_bar", True)) and not own


def _doctor(run: RunFolder, given: bool | Mapping[str, Any], record: bool) -> list[Callback]:
    arguments = dict(given) if isinstance(given, Mapping) else {}
    if record and getattr(arguments.get("actions"), "on_alarm", None) == "rollback":
        raise ValueError("on_alarm='rollback' needs a second Trainer: use rlhf-train doctor=act")
    return [] if given is False else [_made("doctor", Doctor, run, **arguments)]


def _saving(
    run: RunFolder, saving: dict[str, Any], stops: int | Mapping[str, Any] | None, *, keeps: bool
) -> list[Callback]:
    """Return what saves checkpoints, and what ends the run early with the best of them."""
    if stops is None:
        return [_made("checkpoint", checkpointing.IterationCheckpoint, run.checkpoints, **saving)]
    if not keeps:
        raise ValueError("early_stopping needs checkpoints: enable_checkpointing=False keeps none")
    stopping = {"patience": stops} if isinstance(stops, int) else stops
    watched = stopping.get("monitor", STOPS_BY)
    if saving.get("monitor") is None:
        saving |= {"monitor": watched, "mode": stopping.get("mode")}
    # Left to itself, Lightning looks at the end of the epoch where each iteration is validated.
    usual = {"monitor": watched, "check_on_train_epoch_end": False}
    ending = _made("early_stopping", checkpointing.PatientStopping, **{**usual, **stopping})
    checkpoints = _made("checkpoint", checkpointing.IterationCheckpoint, run.checkpoints, **saving)
    return [checkpoints, ending]


def _made(argument: str, cls: Callable[..., Callback], *args: Any, **given: Any) -> Callback:
    """Return a callback; what it refuses is said of the argument that was given for it."""
    try:
        return cls(*args, **given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument}: {error}") from None


def _logger(run: RunFolder, kind: str) -> Logger:
    if kind == "wandb":
        return wandb_logger(run)
    if kind == "tensorboard":
        return tensorboard_logger(run)
    raise ValueError(f"logger={kind!r} must be 'wandb', 'tensorboard' or a logger of Lightning")


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
