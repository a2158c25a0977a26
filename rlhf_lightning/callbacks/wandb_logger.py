"""Weights & Biases: offline without a login, never a prompt, never the end of a run.

Beside the curves there are histograms, samples, alerts and lineage; a run without a W&B logger has
none of it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import wandb
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import DummyExperiment, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from rlhf_lightning.arguments import checked
from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.callbacks.iterations import current_iteration
from rlhf_lightning.callbacks.run_tables import describe_rollout
from rlhf_lightning.modules.on_policy import OnPolicyModule
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import ITERATION, RunFolder, from_here, to_json
from rlhf_lightning.runs.metric_catalog import FAMILIES, QUANTITIES
from rlhf_lightning.runs.public_config import name_secrets
from rlhf_lightning.runs.stopping import RunStoppedError
from rlhf_lightning.runs.summary import GateResult

logger = logging.getLogger(__name__)

Mode = Literal["auto", "online", "offline", "disabled"]
AlertLevel = Literal["INFO", "WARN", "ERROR"]
PROJECT = "rlhf_lightning"
NUM_BINS = 64  # of a histogram
LONGEST_TEXT = 2000  # characters of a cell
_DATA_FOLDER = "WANDB_DATA_DIR"
_own_places: set[str] = set()  # of the runs of this process

# Columns of a table, by their keys in a sample. The baseline has answers to held-out prompts alone.
COLUMNS = {
    **{"prompt": "prompt", "response": "response", "baseline_response": "baseline response"},
    **{"score": "score", "baseline_score": "baseline score"},
    **{"kl": "KL", "length": "length", "domain": "domain"},
}


def choose_mode(mode: Mode) -> str:
    """Return the mode to use, without a network and without a prompt."""
    wanted = mode
    if mode == "auto":  # WANDB_DISABLED is of transformers: wandb itself does not know it
        off = os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on")
        wanted = "disabled" if off else os.environ.get("WANDB_MODE", "online")  # type: ignore[assignment]
    if wanted not in ("online", "shared", "run") or is_logged_in():
        return wanted
    if mode == "online":
        fix = "set WANDB_API_KEY or run `wandb login`, and `wandb sync` this run"
        logger.warning(f"logger.mode=online, and no login to W&B: this run is offline; {fix}")
    return "offline"


def is_logged_in() -> bool:
    """Return whether wandb finds a key for its host; it asks neither the user nor the host."""
    try:
        wandb.setup(wandb.Settings(silent=True))  # otherwise it asks the host for the user's name
        return wandb.login(prompt=False, verify=False)
    except Exception as error:  # of a key or a variable WANDB_*: it must not end a run
        logger.warning("Weights & Biases: %s", error)
        return False


class IterationWandbLogger(WandbLogger):
    """Lightning's logger with `iteration` as the x-axis of everything.

    If W&B cannot start or fails later, the run continues without it: `metrics.csv` has the same
    numbers. A warning says so once. Needs `Trainer(log_every_n_steps=1)`.

    Args:
        id_file: keeps the id of the W&B run.
        settings: keyword arguments of `WandbLogger`.
    """

    def __init__(self, id_file: Path, **settings: Any) -> None:
        super().__init__(**settings)
        self._wandb_init.pop("anonymous", None)  # deprecated by wandb, and warned about
        self._id_file = id_file
        self._url: str | None = None  # once it is shown there
        self._has_failed = False

    @property
    def shown_in(self) -> str:
        """The place of this run in a line: its address, or the command that uploads it."""
        mode = str(self._wandb_init.get("mode"))
        if self._has_failed:
            return "off: it did not work; metrics.csv has the numbers"
        if mode == "disabled":
            return "off"
        if mode == "offline":
            place = from_here(self._id_file.parent.resolve())
            return f"offline: wandb sync {place}/offline-run-*"
        return f"online: {self._url or self._wandb_init.get('project')}"

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run; one that records nothing if W&B cannot start."""
        if self._experiment is None:
            try:
                self._experiment = self._start(**self._wandb_init)
            except Exception as error:  # any failure of a service must not end hours of training
                self._give_up(error)
        return self._experiment

    def _start(self, **settings: Any) -> Any:
        run = wandb.init(**settings)
        write_text(self._id_file, f"{run.id}\n")
        self._url = run.url
        run.define_metric(ITERATION)
        # Each by its name: then the workspace shows its x-axis, and a new name has it too.
        families = [f for f in FAMILIES if f.index("*") == len(f) - 1]  # as W&B wants them
        for name in (*QUANTITIES, *families, "*"):
            run.define_metric(name, step_metric=ITERATION)
        return run

    def _give_up(self, error: Exception) -> None:
        what = "the run goes on without it, metrics.csv has what follows (or logger.mode=offline)"
        logger.warning(f"Weights & Biases failed ({error!r}): {what}")
        self._has_failed = True
        self._experiment = DummyExperiment()  # type: ignore[assignment]

    @rank_zero_only
    def guarded(self, action: Any) -> None:
        """Do something with the W&B run; if it fails, the run continues without W&B."""
        if isinstance(self.experiment, DummyExperiment):
            return
        try:
            action()
        except Exception as error:  # see `experiment`
            self._give_up(error)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log one row.

        Args:
            metrics: number by name.
            step: batches done before this one, as Lightning counts them; the row is that of
                iteration `step + 1`.
        """
        # NaN says that something was not measured.
        row = {k: v for k, v in metrics.items() if k not in ("epoch", "step") and v == v}
        if step is not None:
            row[ITERATION] = step + 1
        self.guarded(lambda: self.experiment.log(row))

    def log_row(self, iteration: int, values: Mapping[str, Any]) -> None:
        """Log what belongs to `iteration`: numbers, or anything else that W&B shows."""
        self.guarded(lambda: self.experiment.log({**values, ITERATION: iteration}))

    def alert(self, title: str, text: str, level: AlertLevel = "WARN") -> None:
        """Send an alert to the subscribers of the W&B project."""
        self.guarded(lambda: self.experiment.alert(title, text, level))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Add to the configuration of the W&B run, unless it was given the whole one."""
        if not self._wandb_init.get("config"):
            self.guarded(lambda: super(IterationWandbLogger, self).log_hyperparams(params))

    @rank_zero_only
    def finish(
        self,
        metrics: Mapping[str, float | None] | None = None,
        gates: Sequence[GateResult] = (),
        *,
        exit_code: int = 0,
    ) -> None:
        """Write final metrics and gates into the summary of the W&B run and close it."""
        self.summarize(metrics or {}, gates)
        self.guarded(lambda: self.experiment.finish(exit_code=exit_code))
        self._experiment = DummyExperiment()  # type: ignore[assignment]  # not a second run

    def summarize(
        self, metrics: Mapping[str, float | None], gates: Sequence[GateResult] = ()
    ) -> None:
        """Write metrics and gates into the summary of the W&B run.

        Gates are a table `gates` and a summary value `gates/<name>`, 1 for passed and 0 for not,
        none where nothing was measured; one alert names those that failed.
        """

        def write() -> None:
            run = self.experiment
            run.summary.update(dict(metrics))
            if gates:
                rows = [[g.name, g.word, g.value, g.threshold, g.reason] for g in gates]
                columns: list[str | int] = ["gate", "result", "value", "threshold", "reason"]
                run.log({"gates": wandb.Table(columns=columns, data=rows)})
            for gate in (one for one in gates if one.word != "not measured"):
                run.summary[f"gates/{gate.name}"] = int(gate.passed)

        if failed := [f"{gate.name}: {gate.reason}" for gate in gates if not gate.passed]:
            self.alert(f"{len(failed)} of {len(gates)} gates failed", "\n".join(failed))
        self.guarded(write)


@checked
def wandb_logger(
    folder: RunFolder,
    *,
    project: str | None = None,
    name: str | None = None,
    group: str | None = None,
    tags: Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    mode: Mode = "auto",
) -> IterationWandbLogger:
    """Return the logger of a run, which writes to `wandb/` of the run folder.

    Args:
        folder: the run folder; it keeps the id of the W&B run, so that a resumed run continues the
            same one: online the curves continue, offline there is a second segment with the same
            id.
        project: name of the W&B project; None for `WANDB_PROJECT`, or `rlhf_lightning`.
        name: display name; None for `WANDB_NAME`, or the name of the run folder.
        group: name of the W&B group; None for `WANDB_RUN_GROUP`.
        tags: tags of the W&B run; None for `WANDB_TAGS`, which commas separate.
        config: the configuration as plain values.
        mode: `auto` is online with a login and if neither `WANDB_MODE` nor `WANDB_DISABLED` says
            otherwise, else offline; `online` without a key is offline with a warning.

    Raises:
        ValueError: for an unknown mode.
    """
    # W&B keeps in the home folder what it is going to upload, and a run that is synced elsewhere
    # would lack its tables.
    if os.environ.get(_DATA_FOLDER) in (None, *_own_places):
        os.environ[_DATA_FOLDER] = place = str(folder.wandb.resolve())
        _own_places.add(place)
    id_file = folder.create().wandb / "run_id"
    # An agent of a W&B sweep says itself which run it has begun.
    given = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
    # Without a checkpoint nothing can be resumed: the id is that of a run that ended before one.
    resumes = id_file.is_file() and any(folder.checkpoints.glob("*.ckpt"))
    kept = id_file.read_text("utf-8").strip() if resumes else None
    return IterationWandbLogger(
        id_file,
        project=project or os.environ.get("WANDB_PROJECT") or PROJECT,
        name=name or os.environ.get("WANDB_NAME") or folder.name,
        group=group,
        tags=tags if tags is None else list(tags),
        config=dict(config or {}),
        save_dir=str(folder.path),
        id=given or kept,
        mode=choose_mode(mode),
        reinit="create_new",
        settings=wandb.Settings(
            silent=True,
            console="off",
            show_errors=False,
            show_warnings=False,
            init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", 30)),
            # W&B records the command line, whatever it contains.
            x_disable_meta=name_secrets(sys.argv),
        ),
    )


class WandbContent(Callback):
    """Show rollouts in W&B, and send an alert when a run ends early.

    Histograms `histograms/<name>` every iteration: scores and response lengths by row, advantages
    by token, of the first process; probability ratios of the updates by token, of all. Tables
    `samples/best` and `samples/worst` by score every few iterations, of the first process.

    Args:
        every_n_iterations: iterations between two tables; the first iteration also has them.
        num_samples: rows of each table.
    """

    def __init__(self, *, every_n_iterations: int = 10, num_samples: int = 8) -> None:
        self.every_n_iterations = every_n_iterations
        self.num_samples = num_samples

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the rollout that the step returned, if it returned one."""
        rollout = outputs.get("rollout") if isinstance(outputs, Mapping) else None
        if rollout is None or not trainer.is_global_zero:
            return
        iteration = current_iteration(trainer)
        for logger in wandb_loggers(trainer):
            histograms = rollout_histograms(rollout, outputs.get("ratio_counts"))
            logger.log_row(iteration, {f"histograms/{k}": v for k, v in histograms.items()})
            if iteration == 1 or iteration % self.every_n_iterations == 0:
                module = cast(OnPolicyModule, pl_module)
                log_samples(logger, iteration, "best", self._ends(rollout, module, best=True))
                log_samples(logger, iteration, "worst", self._ends(rollout, module, best=False))

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Send an alert that says why the run ended early, and close it."""
        if trainer.state.fn == "fit":
            _alert_end(trainer, exception)

    def _ends(
        self, rollout: RolloutBatch, module: OnPolicyModule, *, best: bool
    ) -> list[dict[str, Any]]:
        scored = rollout[~rollout.known_scores.isnan()]
        order = scored.scores.float().cpu().argsort(descending=best, stable=True)
        rows, skip = scored[order[: self.num_samples]], module.sampling.skip_special_tokens
        return describe_rollout(rows, module.tokenizer, len(rows), skip_special_tokens=skip)


def wandb_loggers(trainer: Trainer) -> list[IterationWandbLogger]:
    """Return the W&B loggers of a Trainer."""
    return [logger for logger in trainer.loggers if isinstance(logger, IterationWandbLogger)]


def shown_in_wandb(trainer: Trainer) -> str:
    """Return where W&B shows the run of a Trainer, in a line for the first and the last screen."""
    return next((one.shown_in for one in wandb_loggers(trainer)), "off: logger=wandb shows it")


@contextmanager
def early_end_alerted(trainer: Trainer) -> Iterator[None]:
    """Do for what happens behind `fit` as `WandbContent.on_exception` does within it."""
    try:
        yield
    except BaseException as error:
        _alert_end(trainer, error)
        raise


def _alert_end(trainer: Trainer, error: BaseException) -> None:
    stopped = isinstance(error, RunStoppedError | KeyboardInterrupt)
    cause = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_TEXT]
    for logger in wandb_loggers(trainer):
        title = f"the run {'was stopped' if stopped else 'failed'}"
        logger.alert(title, cause, "WARN" if stopped else "ERROR")
        logger.finish(exit_code=1)


def log_samples(
    logger: IterationWandbLogger, iteration: int, table: str, samples: Sequence[Mapping[str, Any]]
) -> None:
    """Write `samples/<table>`, one row a sample, as `samples.jsonl` has them.

    Args:
        logger: logger of the run.
        iteration: iteration of the policy that responded.
        table: held_out, best or worst.
        samples: their number and texts are bounded here: nothing else keeps a run small.
    """
    keys = [k for k in COLUMNS if table == "held_out" or not k.startswith("baseline")]
    rows = [[iteration, *(_cell(sample.get(key)) for key in keys)] for sample in samples[:100]]
    if rows:
        names: list[str | int] = [ITERATION, *(COLUMNS[key] for key in keys)]
        content = wandb.Table(columns=names, data=rows, allow_mixed_types=True)
        logger.log_row(iteration, {f"samples/{table}": content})


def rollout_histograms(
    rollout: RolloutBatch, ratio_counts: Tensor | None = None
) -> dict[str, wandb.Histogram]:
    """Return the histograms of a rollout: scores, lengths, advantages and, where known, ratios.

    Args:
        rollout: rollout of this process.
        ratio_counts: how often the updates saw a ratio, by equal bins over [0, 2]; None if there
            were none.
    """
    mask = rollout.response_mask
    values = {"scores": rollout.known_scores, "advantages": rollout.advantages[mask]}
    values["lengths"] = mask.sum(1)
    numbers = {name: tensor.detach().float().cpu() for name, tensor in values.items()}
    finite = {name: each[each.isfinite()].tolist() for name, each in numbers.items()}
    found = {k: wandb.Histogram(each, num_bins=NUM_BINS) for k, each in finite.items() if each}
    if ratio_counts is not None and int(ratio_counts.sum()):
        edges = np.linspace(0.0, 2.0, len(ratio_counts) + 1)
        counts = ratio_counts.long().cpu().numpy()
        found["ratios"] = wandb.Histogram(np_histogram=(counts, edges))
    return found


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return value[:LONGEST_TEXT].encode("utf-8", "replace").decode("utf-8")
    return value


@dataclass(frozen=True)
class Origin:
    """A model or a set of records.

    Args:
        role: what the run used or made it as: base, sft, reward, data, ...
        name: the same in every run that refers to it.
        kind: kind of artifact, `model` or `dataset`.
        fingerprint: fingerprint of its content.
        metadata: plain values that W&B shows beside it.
    """

    role: str
    name: str
    kind: str
    fingerprint: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


def records_fingerprint(records: Iterable[object]) -> str:
    """Return a SHA-256 over records, which are dataclasses of plain values, in their order."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(repr(record).encode("utf-8", "backslashreplace") + b"\0")
    return digest.hexdigest()


def log_lineage(
    logger: IterationWandbLogger, used: Iterable[Origin], made: Iterable[Origin]
) -> None:
    """Record in W&B what a run used and what it made.

    Both are in the configuration as `lineage.used` and `lineage.made`, by role. What was made is an
    artifact too, and online so is what was used; offline W&B cannot mark an artifact as used, and
    the configuration alone says it.
    """
    used, made, run = list(used), list(made), logger.experiment
    lineage = {"used": _by_role(used), "made": _by_role(made)}
    run.config.update({"lineage": lineage}, allow_val_change=True)
    for origin in made:
        run.log_artifact(as_artifact(origin))
    for origin in [] if getattr(run, "offline", True) else used:
        run.use_artifact(as_artifact(origin))


def as_artifact(origin: Origin) -> wandb.Artifact:
    """Return the artifact of an origin; equal fingerprints give equal digests."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", origin.name).strip("-") or origin.kind
    artifact = wandb.Artifact(name[:120], type=origin.kind, metadata=dict(origin.metadata))
    with artifact.new_file("fingerprint.json", mode="w", encoding="utf-8") as file:
        file.write(to_json({"fingerprint": origin.fingerprint}) + "\n")
    return artifact


def _by_role(origins: Iterable[Origin]) -> dict[str, dict[str, str]]:
    return {o.role: {"artifact": o.name, "fingerprint": o.fingerprint} for o in origins}
