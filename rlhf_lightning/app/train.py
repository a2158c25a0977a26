"""Train one stage of RLHF: `python -m rlhf_lightning.train +experiment=sft | reward | ppo`."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from rlhf_lightning.app.as_python import as_python
from rlhf_lightning.app.build import assemble, check_devices, check_run, computing
from rlhf_lightning.app.command_line import (
    check_command_line,
    ended_in_one_line,
    fail,
    run_job,
    say,
    this_job,
)
from rlhf_lightning.app.config.inherit import command_settings
from rlhf_lightning.app.config.saved import keep_configuration
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.ways import FITTED, TYPED
from rlhf_lightning.app.evaluation import TrainingComponents, gates_of, measure
from rlhf_lightning.app.failures import REFUSALS, exit_with, explain_failure, refusing
from rlhf_lightning.app.model_export import export_trained
from rlhf_lightning.app.next_command import after_training
from rlhf_lightning.app.prerequisites import check_world, prepare_inputs
from rlhf_lightning.app.run_claim import check_folder, hydra_log, record_end, runs_to_continue
from rlhf_lightning.app.run_summary import few_steps, memory_advice, start_settings
from rlhf_lightning.app.start import AS_PYTHON
from rlhf_lightning.app.sweep import in_sweep, should_continue
from rlhf_lightning.app.tracking import finish_tracking
from rlhf_lightning.callbacks.checkpointing import kept_weights
from rlhf_lightning.callbacks.console import print_start, print_verdict
from rlhf_lightning.callbacks.doctor.callback import Doctor, write_handover
from rlhf_lightning.callbacks.iterations import current_iteration
from rlhf_lightning.callbacks.run_record import about_run
from rlhf_lightning.callbacks.wandb_logger import early_end_alerted, shown_in_wandb, wandb_loggers
from rlhf_lightning.distributed.launch import (
    adopt_rank,
    as_single_run,
    broadcast_from_rank0,
    forget_ranks,
    global_rank,
    own_agreements,
    own_meeting_place,
)
from rlhf_lightning.models.precision import set_matmul_precision
from rlhf_lightning.models.quiet import quieten
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.reports.page import write_report
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import claim_run, drop_leftovers, drop_unused
from rlhf_lightning.runs.public_config import public_words, without_folders
from rlhf_lightning.runs.resume import check_checkpoint, newest_complete_checkpoint
from rlhf_lightning.runs.stopping import RunStoppedError, stopping_on_signals
from rlhf_lightning.runs.summary import Summary, figure, new_summary, resumed, write_summary

logger = logging.getLogger(__name__)


@own_agreements()
@stopping_on_signals()
def run(settings: TrainSettings, folder: RunFolder, overrides: list[str]) -> Summary:
    """Train a stage from its settings to its report.

    Args:
        settings: settings of the command.
        folder: folder of a new run; with `resume=auto` an unfinished one replaces it.
        overrides: overrides of the command line, for stages that must be trained first.

    Returns:
        The summary, as written to the run folder.

    Raises:
        ConfigError: if the configuration cannot work.
        RunFailedError: if memory or disk ran out, with what to change.
    """
    check_run(settings)
    check_devices(settings)
    first = global_rank() == 0  # which alone writes
    if first:
        check_folder(settings, folder)
        check_world(settings, [settings.start])
        keep_configuration(settings, folder)
    settings = _with_models(settings, overrides)
    folder, checkpoint = _agreed_start(settings, folder)
    continued = checkpoint is not None and folder.path.resolve() in checkpoint.resolve().parents
    begun = new_summary(
        settings.stage, seed=settings.seed, config_hash=settings.config_hash, title=settings.title
    )
    begun = resumed(begun, folder) if continued else begun
    begun = replace(begun, about=about_words(overrides))
    summary = replace(begun, judged=not settings.only_runs)
    started = time.perf_counter()
    claim = partial(claim_run, folder.path, lambda: check_folder(settings, folder))
    with claim() if first else nullcontext(), computing(settings.model):
        try:
            if first and not continued:
                drop_leftovers(folder)
            if first:
                write_summary(folder, summary)
            return _train(settings, folder, checkpoint, summary, overrides)
        except BaseException as error:
            failure = explain_failure(error, folder, memory_advice(settings, overrides))
            if first:
                ended = replace(summary, seconds={"total": _total(summary, started)})
                record_end(folder, ended, failure or error)
            if failure is not None:
                raise failure from error
            raise


def _with_models(settings: TrainSettings, overrides: list[str]) -> TrainSettings:
    """Return the settings with the models that the stage starts from, which rank 0 makes."""

    def prepared() -> str:
        return json.dumps(prepare_inputs(settings, overrides).artifacts.models())

    models = json.loads(broadcast_from_rank0("inputs", prepared, patience=timedelta(days=1)))
    if models == settings.artifacts.models():
        return settings
    return settings.updated({f"artifacts.{kind}": source for kind, source in models.items()})


def about_words(overrides: list[str]) -> dict[str, str]:
    """Return what the user wrote, and what was fitted to it, as the page shows them."""
    typed = TYPED if TYPED and not in_sweep() else overrides
    fitted = [one for one in overrides if one.startswith(FITTED) and one not in typed]
    command = shlex.join(["rlhf-train", *map(without_folders, public_words(typed))])
    return {"command": command} | ({"fitted to the context": ", ".join(fitted)} if fitted else {})


def _total(summary: Summary, started: float) -> float:
    return summary.seconds.get("total", 0.0) + time.perf_counter() - started


def _train(
    settings: TrainSettings,
    folder: RunFolder,
    checkpoint: Path | None,
    summary: Summary,
    overrides: list[str],
) -> Summary:
    times = [time.perf_counter()]
    quieten()
    set_matmul_precision(settings.trainer.matmul_precision)
    L.seed_everything(settings.seed, workers=True, verbose=False)
    # 1 module, data, trainer
    with refusing():
        parts = assemble(settings, folder)
    settings = parts.settings  # with what was found out since
    about = about_run(parts.module, parts.data, name=settings.dataset.name)
    summary = replace(summary, about={**summary.about, **about}, warning=few_steps(settings, parts))
    if parts.trainer.is_global_zero:
        write_summary(folder, summary)
        title = settings.title if settings.name == settings.stage else settings.name
        print_start(title, folder, start_settings(settings, parts, checkpoint))
        say(parts.data.render_summary())
    times.append(time.perf_counter())
    # 2 fit
    parts = _fit(parts, checkpoint)
    times.append(time.perf_counter())
    with early_end_alerted(parts.trainer):
        # 3 compare
        findings = measure(parts)
        gates = gates_of(settings, findings.metrics)
        times.append(time.perf_counter())
        # 4 export and publish
        if parts.trainer.is_global_zero:
            findings.write(folder, current_iteration(parts.trainer))
        export_trained(parts, findings, gates, summary.warning)
        times.append(time.perf_counter())
        # 5 summary, report, last screen
        phases = zip(("setup", "fit", "measure", "export"), pairwise(times), strict=True)
        seconds = {name: end - start for name, (start, end) in phases}
        seconds["total"] = _total(summary, times[0])
        ended: dict[str, Any] = {"metrics": dict(sorted(findings.metrics.items())), "gates": gates}
        ended |= {"seconds": seconds, "about": {**summary.about, **kept_weights(parts.trainer)}}
        summary = replace(summary, status="completed", **ended)
        if parts.trainer.is_global_zero:
            summary = replace(summary, next=after_training(settings, folder, overrides))
            told = write_summary(folder, summary)  # with what the doctor said
            write_report(folder)
            finish_tracking(parts, findings, summary)
            print_verdict(told, folder, wandb=shown_in_wandb(parts.trainer))
    return summary


class DropsOptimizerState(Checkpoint):
    """Drops gradients and optimizer state when training has ended.

    Lightning would move the state to host memory, twice the size of the trained weights. It is a
    checkpoint callback because Lightning calls those last: what they save has the state.
    """

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Drop them."""
        for optimizer in trainer.optimizers:
            optimizer.zero_grad(set_to_none=True)
            optimizer.state.clear()


def _fit(parts: TrainingComponents, checkpoint: Path | None) -> TrainingComponents:
    """Train to the end; after a rollback of the doctor, continue from there with its changes.

    Returns:
        The parts of the last fit, which hold the trained models.

    Raises:
        RunStoppedError: on every rank, if the doctor stops the run.
    """
    while True:
        cast(Any, parts.trainer).callbacks.append(DropsOptimizerState())
        try:
            parts.trainer.fit(
                parts.module, datamodule=parts.data, ckpt_path=checkpoint, weights_only=True
            )
        except SystemExit as error:  # what Lightning makes of an interrupt
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            raise
        doctors = (c for c in cast(Any, parts.trainer).callbacks if isinstance(c, Doctor))
        doctor = next(doctors, None)
        if doctor is None or doctor.request is None:
            return parts
        back = int(cast(float, doctor.request.value))  # else a RunStoppedError has ended the fit
        checkpoint = parts.folder.checkpoints / f"iteration={back:06d}.ckpt"
        if parts.trainer.is_global_zero:
            write_handover(parts.folder, doctor.hand_over(back))
        logger.warning("doctor: a new fit starts from %s", checkpoint.name)
        for tracker in wandb_loggers(parts.trainer):
            tracker.finish()  # W&B refuses to open a run a second time
        parts.trainer = parts.module = None  # type: ignore[assignment]  # their memory is needed
        del doctor, doctors
        parts = assemble(parts.settings, parts.folder)


def _agreed_start(settings: TrainSettings, folder: RunFolder) -> tuple[RunFolder, Path | None]:
    """Return the run folder and the checkpoint to continue; rank 0 looks, the others follow."""

    def start() -> str:
        chosen, checkpoint = _where_to_start(settings, folder)
        if checkpoint is not None:
            check_checkpoint(checkpoint)
        return json.dumps([str(chosen.path), None if checkpoint is None else str(checkpoint)])

    path, checkpoint = json.loads(broadcast_from_rank0("start", start))
    return RunFolder(Path(path)), None if checkpoint is None else Path(checkpoint)


def _where_to_start(settings: TrainSettings, folder: RunFolder) -> tuple[RunFolder, Path | None]:
    if settings.ckpt_path is not None:  # which `check_run` has found
        return folder, Path(settings.ckpt_path)
    if settings.resume == "auto":
        for unfinished in runs_to_continue(settings, folder):
            checkpoint = newest_complete_checkpoint(unfinished, settings.config_hash)
            if checkpoint is not None:
                drop_unused(folder, unfinished, hydra_log(), link=in_sweep())
                return unfinished, checkpoint
    return folder, None


def objective(summary: Summary, module: type[RLHFModule]) -> float | None:
    """Return what a sweep maximises, of a summary of a training of this class.

    PPO: win rate by the learnt score; reward model: accuracy; SFT: minus the held-out loss. None,
    which Optuna counts as a failed trial, where it is not finite: NaN would end the whole search.
    """
    value = figure(summary.metrics, module.objective)
    return value if value is None or module.maximised else -value


def _job(cfg: Any) -> float | None:
    adopt_rank()  # of a job that submitit has started
    folder, overrides = this_job()
    if in_sweep():
        as_single_run(overrides)
        own_meeting_place()
    kind = str(cfg["stage"]).replace(".", "_").lower()  # of a configuration that is refused
    try:
        settings = command_settings("train", cfg, overrides)
        kind = settings.stage
        summary = run(settings, folder, overrides)
    except (Exception, KeyboardInterrupt, RunStoppedError) as error:  # told in one line
        try:
            if isinstance(error, REFUSALS):
                fail(str(error))
            exit_with(error)
        except SystemExit:
            if not should_continue(folder, error, kind=kind, seed=cfg["seed"]):
                raise
        return None  # which a search takes for a trial that failed
    finally:
        if in_sweep():
            forget_ranks()
    return objective(summary, settings.spec)


def main() -> None:
    """Run the command line."""
    adopt_rank()
    if AS_PYTHON in sys.argv:
        sys.argv.remove(AS_PYTHON)
        if (settings := check_command_line("train")) is None:
            fail(f"{AS_PYTHON} prints one run: leave -m and other flags out")
        with ended_in_one_line():
            say(as_python(settings, sys.argv[1:]))
        return
    run_job("train", _job)
