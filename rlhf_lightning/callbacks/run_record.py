"""The record of a run that a Trainer makes without the application: summary, report, resume."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import WandbLogger

from rlhf_lightning import hparams
from rlhf_lightning.callbacks.checkpointing import ended_with, kept_weights
from rlhf_lightning.callbacks.console import print_verdict
from rlhf_lightning.callbacks.iterations import current_iteration, out_of_time
from rlhf_lightning.callbacks.wandb_logger import log_samples, wandb_loggers
from rlhf_lightning.data.record_datamodule import RecordDataModule
from rlhf_lightning.data.summary import held_out_rows
from rlhf_lightning.evaluation.final_metrics import Findings, trained_findings
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.reports.page import write_report
from rlhf_lightning.runs import summary as summaries
from rlhf_lightning.runs.folder import ITERATION, RunFolder, read_metrics, run_behind
from rlhf_lightning.runs.lock import FolderTakenError, check_free, claim_run, drop_leftovers
from rlhf_lightning.runs.public_config import without_folders
from rlhf_lightning.runs.stopping import stop_behind
from rlhf_lightning.runs.summary import GateResult, Summary, read_summary, write_summary

logger = logging.getLogger(__name__)
Gates = tuple[GateResult, ...]


class RunRecord(Callback):
    """Keep `summary.json` and `report.html` of a run folder, and refuse to run over another run.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._claim = ExitStack()
        self._summary: Summary | None = None
        self._compared: set[str] = set()  # figures of the comparison before
        self._started = 0.0
        self._resumes = False

    def on_load_checkpoint(self, trainer: Trainer, *_: Any) -> None:
        """Note that the run is continued: a checkpoint of another run only begins a new one."""
        places = Path(str(trainer.ckpt_path)).resolve().parents
        self._resumes = self.folder.path.resolve() in places

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Claim the folder, which must be free unless its run is continued.

        Raises:
            FolderTakenError: on every rank, if it is not.
        """
        module, resumes, self._resumes = cast(RLHFModule, pl_module), self._resumes, False
        stage, title = module.stage, module.title_of(module.algorithm)
        if cast(Any, trainer).fast_dev_run:
            return
        taken = None
        if trainer.is_global_zero:
            written = _written_by_loggers(trainer, self.folder.path)
            check = partial(check_free, self.folder, stage, also=written)
            try:
                claim = claim_run(self.folder.path, lambda: None if resumes else check())
                self._claim.enter_context(claim)  # until the fit has ended
            except FolderTakenError as error:
                taken = str(error)
        if (taken := trainer.strategy.broadcast(taken)) is not None:
            raise FolderTakenError(taken)
        self._started = time.perf_counter()
        seed = pl_module.hparams.get("seed")
        begun = summaries.new_summary(stage, seed=seed, config_hash=None, title=title)
        begun = summaries.resumed(begun, self.folder) if resumes else begun
        about = about_run(pl_module, getattr(trainer, "datamodule", None))
        about["not the default"] = _not_default(pl_module)
        self._summary = replace(begun, about=about)
        if trainer.is_global_zero:
            if not resumes:
                drop_leftovers(self.folder)
            write_summary(self.folder, self._summary)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the summary of a run that ended, and its report."""
        if self._summary is None:
            return
        if not current_iteration(trainer):
            self._end(trainer, status="failed", cause="no iteration was trained: give more than 0")
        elif out_of_time(trainer):
            self._end(trainer, status="stopped", cause="max_time of the Trainer is over")
        else:
            self._end(trainer, self._shown(trainer, pl_module), status="completed")

    def _shown(self, trainer: Trainer, module: LightningModule) -> Findings:
        """Return what the training shows; of its pairs nothing where not all were validated."""
        data: Any = getattr(trainer, "datamodule", None)
        if not isinstance(data, RecordDataModule):
            return Findings({})
        limit = trainer.limit_val_batches  # 1 is one batch, 1.0 all of them
        whole = isinstance(limit, float) and limit == 1
        # Pairs of a training forward: two responses each.
        most = getattr(cast(RLHFModule, module).algorithm, "micro_batch_size", None)
        batch_size = data.batch_size if most is None else min(data.batch_size, 2 * most)
        rows = read_metrics(self.folder.metrics) if trainer.is_global_zero else []
        find = partial(trained_findings, module, data, rows, batch_size=batch_size)
        try:
            with trainer.strategy.precision_plugin.forward_context():
                return find(pairs=whole)
        except torch.OutOfMemoryError as error:  # the training has ended well
            logger.warning("the page has no held-out pairs: %s", error)
            return find(pairs=False)

    def on_normalize_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Add what `normalize_reward_model` found to the summary and the report of the run.

        Args:
            trainer: Trainer of the reward model.
            metrics: mean and standard deviation of its scores before; of a second call those that
                the first call left.
        """
        if trainer.is_global_zero and self.folder.summary.is_file():
            summary = read_summary(self.folder)
            before, found = summary.metrics, dict(metrics)
            mean, spread = (before.get(f"reward/sample_{name}") for name in ("mean", "std"))
            if found and mean is not None and spread is not None:  # of what was shifted before
                found["reward/sample_mean"] = mean + spread * found["reward/sample_mean"]
                found["reward/sample_std"] *= spread
            write_summary(self.folder, replace(summary, metrics={**before, **found}))
            write_report(self.folder)

    def on_compare_end(
        self, trainer: Trainer, findings: Findings, gates: Gates, baseline: str, judge: object
    ) -> None:
        """Add the results of `compare` to the summary and the report.

        A comparison while the run is under way is not added.

        Args:
            trainer: Trainer of the policy.
            findings: results of the comparison.
            gates: results of the gates.
            baseline: name of the other policy.
            judge: judge of the comparison: a name, a function or a scorer.
        """
        if not trainer.is_global_zero or not self.folder.summary.is_file():
            return
        summary = read_summary(self.folder)
        if summary.status == "running":
            return
        module = trainer.lightning_module
        iteration = current_iteration(trainer)
        # Iteration 0 is that of an evaluation: the baseline may be any policy.
        findings.write(self.folder, iteration if baseline == _start(module) else 0)
        for tracker in wandb_loggers(trainer):
            log_samples(tracker, iteration, "held_out", findings.samples)
            tracker.summarize(findings.metrics, gates)
        about = {**summary.about, "baseline": without_folders(baseline)}
        about["compared by"] = without_folders(_reward(judge))
        kept = {k: v for k, v in summary.metrics.items() if k not in self._compared}
        self._compared, metrics = set(findings.metrics), {**kept, **findings.metrics}
        write_summary(self.folder, replace(summary, metrics=metrics, gates=gates, about=about))
        write_report(self.folder)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Write why the run ended."""
        error = (stop := stop_behind(exception)) or exception
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        self._end(trainer, status="failed" if stop is None else "stopped", cause=cause)
        self._summary = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the run alone, which has ended: a prediction that fails is none of its ends."""
        self._summary = None

    def _end(self, trainer: Trainer, findings: Findings | None = None, **ended: Any) -> None:
        with self._claim:
            if self._summary is not None and trainer.is_global_zero:
                self._write(trainer, self._summary, findings or Findings({}), **ended)

    def _write(self, trainer: Trainer, begun: Summary, findings: Findings, **ended: Any) -> None:
        best, last = ended_with(trainer), dict[str, float]()
        at, end = 0, best or current_iteration(trainer)
        about = {**begun.about, **kept_weights(trainer)}
        rows = read_metrics(self.folder.metrics)
        # An evaluation every few iterations is one of the end only if it was made there.
        compares = getattr(trainer.lightning_module, "rolls_out", False)
        for row in rows[-1:] if compares else rows:
            found = {k: v for k, v in row.items() if k.startswith("val/")}
            if found and row[ITERATION] <= end:
                last, at = last | found, int(row[ITERATION])
        self._compared = set(last) if compares else set()
        if 0 < at < end:
            about["validated"] = f"at iteration {at}, not at the end"
        # metrics.csv leaves a cell empty that is not finite: the one before it is not the last.
        latest = trainer.callback_metrics if best is None else {}
        for name in last.keys() & latest.keys():
            if not math.isfinite(value := float(latest[name])):
                last[name] = value
                logger.warning("%s is %s at the end: the summary has no figure", name, value)
        before = begun.seconds.get("total", 0.0)
        seconds = {"total": before + time.perf_counter() - self._started}
        ended |= {"metrics": last | findings.metrics, "about": about, "seconds": seconds}
        summary = write_summary(self.folder, replace(begun, **ended))  # with what the doctor said
        findings.write(self.folder, current_iteration(trainer))
        if current_iteration(trainer):
            write_report(self.folder)
            if trainer.progress_bar_callback is not None and not trainer.interrupted:
                print_verdict(summary, self.folder)


class RunStart(Callback):
    """Begin a record before other callbacks write, once it is known whether its run is continued.

    Args:
        record: record of the run.
    """

    def __init__(self, record: RunRecord) -> None:
        self.record = record

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, unless the strategy loads a checkpoint behind this."""
        if not trainer.strategy.restore_checkpoint_after_setup:
            self.record.begin(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, if it does, as FSDP2 does."""
        if trainer.strategy.restore_checkpoint_after_setup:
            self.record.begin(trainer, pl_module)


def _written_by_loggers(trainer: Trainer, folder: Path) -> set[str]:
    """Return the names of what the Trainer's loggers write in a folder: they begin before a fit."""
    places = [place for one in trainer.loggers for place in (one.save_dir, one.log_dir) if place]
    inside = [Path(place).resolve() for place in places]
    inside = [place for place in inside if place.is_relative_to(folder.resolve())]
    parts = {part for place in inside for part in place.relative_to(folder.resolve()).parts[:1]}
    return parts | {"wandb" for one in trainer.loggers if isinstance(one, WandbLogger)}


def _start(module: LightningModule) -> str | None:
    """Return the folder or hub name that a module was built from."""
    return module.hparams.get("policy") or module.hparams.get("source")


def about_run(module: LightningModule, data: object, *, name: str | None = None) -> dict[str, str]:
    """Return from what, on what and against what a module trains.

    Args:
        module: made by `from_pretrained`, or of one's own.
        data: its DataModule; None for batches of its own.
        name: of the data, in place of that of its source.
    """
    given, scorer = module.hparams, getattr(module, "scorer", None)
    start = _start(module)
    begun = "random weights" if given.get("from_scratch") else type(module).__name__
    told = " with another prompt than the policy" if given.get("teacher_prompt") else ""
    teacher = given.get("teacher") and f"{given['teacher'].rstrip('/')}{told}"
    compares = start is not None and hasattr(module, "policy")
    about = {
        "trained from": begun if start is None else run_behind(start),
        "data": "other batches" if data is None else _data(data, name),
        "objective": getattr(getattr(module, "algorithm", None), "kind", None),
        "reward": None if scorer is None else _reward(given.get("reward") or scorer),
        "teacher": teacher,
        "baseline": "the model that it was trained from" if compares else None,
    }
    return {key: without_folders(str(value)) for key, value in about.items() if value is not None}


def _not_default(module: LightningModule) -> str:
    """Return the hyper-parameters of a module from Python that are not the defaults."""
    given, kinds = module.hparams, {name.lower(): kind for name, kind in vars(hparams).items()}
    changed = [
        f"{key}.{field.name}={given[key][field.name]}"
        for key in given
        if isinstance(given[key], dict) and (kind := kinds.get(f"{key}hparams"))
        for field in fields(kind)
        if given[key].get(field.name, field.default) != field.default
    ]
    return without_folders(", ".join(changed) or "nothing")


def _data(data: Any, name: str | None) -> str:
    source = getattr(data, "source", None)
    own = getattr(source, "path", None) or getattr(source, "name", None) or type(source).__name__
    rows = getattr(data, "batch_size", None)
    if not isinstance(data, RecordDataModule):
        return f"{name or own}" if rows is None else f"{name or own}, {rows} rows an iteration"
    told = f"{name or own}: {len(data.rows('train')):,} {data.contents}, "
    told += f"{held_out_rows(data.rows('validation'))}; {rows:,} an iteration"
    answers = getattr(data, "num_generations", 1)
    return told if answers == 1 else f"{told}, {answers} responses to each"


def _reward(scorer: Any) -> str:
    if isinstance(scorer, str):
        return scorer
    weights, parts = getattr(scorer, "weights", None), getattr(scorer, "scorers", None)
    if weights is not None and parts:
        return " + ".join(f"{weights.get(name, 1.0):g} {name}" for name in parts)
    if members := getattr(scorer, "members", None):
        return ", ".join(_reward(member) for member in members)
    names = (getattr(scorer, key, None) for key in ("source", "name", "__name__"))
    return str(next(filter(None, names), type(scorer).__name__))


class LastCheckpoint(ModelCheckpoint):
    """Tell Lightning which checkpoint `ckpt_path="last"` means; save nothing itself.

    Lightning only asks callbacks of this class, and without one starts from the beginning with a
    warning.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._keepers: list[Any] = []
        super().__init__(dirpath=folder.checkpoints, save_top_k=0)
        self.folder = folder

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        last = self.folder.last_checkpoint
        others: list[Any] = cast(Any, trainer).callbacks
        if last.exists():
            return {str(last.resolve())}
        if any(isinstance(one, OnExceptionCheckpoint) for one in others):
            return set()  # with it Lightning asks at every start
        raise FileNotFoundError(f'ckpt_path="last": no checkpoint in {self.folder.checkpoints}')

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Create no folder; take the best of the callback that keeps one, which Lightning asks."""
        others: list[Any] = [one for one in cast(Any, trainer).callbacks if one is not self]
        self._keepers = [one for one in others if hasattr(one, "best_model_path")]

    @property
    def best_model_path(self) -> str:  # type: ignore[override]
        """The best checkpoint of this run by the callback that keeps one, "" if there is none."""
        return next((one.best_model_path for one in self._keepers if one.best_model_path), "")

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        """Take nothing: this callback saves nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is nothing to keep."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing back."""
