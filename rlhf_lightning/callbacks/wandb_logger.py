"""Weights & Biases: offline without a login, never a prompt, never the end of a run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import wandb
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import ITERATION, RunFolder
from rlhf_lightning.runs.metric_catalog import FAMILIES, QUANTITIES
from rlhf_lightning.runs.public_config import name_secrets
from rlhf_lightning.runs.summary import GateResult

logger = logging.getLogger(__name__)

Mode = Literal["auto", "online", "offline", "disabled"]
MODES = ("auto", "online", "offline", "disabled")
PROJECT = "rlhf_lightning"
_YES = ("1", "true", "yes", "on")


def choose_mode(mode: Mode) -> str:
    """Return the mode to use, without a network and without a prompt."""
    wanted = mode
    if mode == "auto":  # WANDB_DISABLED is of transformers: wandb itself does not know it
        off = os.environ.get("WANDB_DISABLED", "").lower() in _YES
        wanted = "disabled" if off else os.environ.get("WANDB_MODE", "online")  # type: ignore[assignment]
    if wanted not in ("online", "shared", "run") or is_logged_in():
        return wanted
    if mode == "online":
        logger.warning(
            "logger.mode=online, but there is no login to Weights & Biases: running offline; set "
            "WANDB_API_KEY or run `wandb login`, and `wandb sync` this run"
        )
    return "offline"


def is_logged_in() -> bool:
    """Return whether wandb finds a key for its host; it asks neither the user nor the host."""
    try:
        wandb.setup(wandb.Settings(silent=True))  # otherwise it asks the host for the user's name
        return wandb.login(prompt=False, verify=False)
    except Exception as error:  # of a key or a variable WANDB_*: it must not end a run
        logger.warning("Weights & Biases: %s", error)
        return False


AlertLevel = Literal["INFO", "WARN", "ERROR"]
_NOT_METRICS = ("epoch", "step")
_DATA_FOLDER = "WANDB_DATA_DIR"
_OWN_PLACES: set[str] = set()  # of the runs of this process
_RUN_ID = "run_id"  # in wandb/ of the run folder
_GATE_COLUMNS = ("gate", "result", "value", "threshold", "reason")


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
        self._failed = False
        self._id_file = id_file

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

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log one row.

        Args:
            metrics: number by name.
            step: batches done before this one, as Lightning counts them; the row is that of
                iteration `step + 1`.
        """
        # NaN says that something was not measured.
        row = {k: v for k, v in metrics.items() if k not in _NOT_METRICS and v == v}
        if step is not None:
            row[ITERATION] = step + 1
        self.guarded(lambda: self.experiment.log(row))

    @rank_zero_only
    def log_row(self, iteration: int, values: Mapping[str, Any]) -> None:
        """Log what belongs to `iteration`: numbers, or anything else that W&B shows."""
        self.guarded(lambda: self.experiment.log({**values, ITERATION: iteration}))

    @rank_zero_only
    def add_config(self, values: Mapping[str, Any]) -> None:
        """Add plain values to the configuration of the W&B run."""
        self.guarded(lambda: self.experiment.config.update(dict(values), allow_val_change=True))

    @rank_zero_only
    def alert(self, title: str, text: str, level: AlertLevel = "WARN") -> None:
        """Send an alert to the subscribers of the W&B project."""
        self.guarded(lambda: self.experiment.alert(title, text, level))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Add to the configuration of the W&B run, unless it was given the whole one."""
        if self._wandb_init.get("config"):
            return
        self.guarded(lambda: super(IterationWandbLogger, self).log_hyperparams(params))

    @rank_zero_only
    def finish(
        self,
        metrics: Mapping[str, float | None] | None = None,
        gates: Sequence[GateResult] = (),
        *,
        exit_code: int = 0,
    ) -> None:
        """Write final metrics and gates into the summary of the W&B run and close it.

        Gates are a table `gates` and a summary value `gates/<name>`, 1 for passed and 0 for not,
        none where nothing was measured; one alert names those that failed.
        """

        def close() -> None:
            run = self.experiment
            for name, value in (metrics or {}).items():
                run.summary[name] = value
            if gates:
                rows = [[g.name, g.word, g.value, g.threshold, g.reason] for g in gates]
                run.log({"gates": wandb.Table(columns=list(_GATE_COLUMNS), data=rows)})
            for gate in (one for one in gates if one.word != "not measured"):
                run.summary[f"gates/{gate.name}"] = int(gate.passed)
            run.finish(exit_code=exit_code)

        if failed := [f"{gate.name}: {gate.reason}" for gate in gates if not gate.passed]:
            self.alert(f"{len(failed)} of {len(gates)} gates failed", "\n".join(failed))
        self.guarded(close)
        self._experiment = None
        self._failed = True  # nothing may open a second run afterwards

    def _start(self, **settings: Any) -> Any:
        if self._failed:
            return DummyLogger().experiment
        run = wandb.init(**settings)
        write_text(self._id_file, f"{run.id}\n")
        run.define_metric(ITERATION)
        # Each by its name: then the workspace shows its x-axis, and a new name has it too.
        families = [f for f in FAMILIES if f.index("*") == len(f) - 1]  # as W&B wants them
        for name in (*QUANTITIES, *families, "*"):
            run.define_metric(name, step_metric=ITERATION)
        return run

    def guarded(self, action: Any) -> None:
        """Do something with the W&B run; if it fails, the run continues without W&B."""
        if self._failed:
            return
        try:
            action()
        except Exception as error:  # see `experiment`
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if not self._failed:
            logger.warning(
                "Weights & Biases does not work (%r): the run goes on without it, its numbers are "
                "in metrics.csv; logger.mode=offline records them for wandb sync",
                error,
            )
        self._failed = True
        self._experiment = DummyLogger().experiment  # type: ignore[assignment]


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
    if mode not in MODES:
        raise ValueError(f"logger.mode={mode!r}, expected one of {', '.join(MODES)}")
    _keep_files_in(folder)
    id_file = folder.create().wandb / _RUN_ID
    # An agent of a W&B sweep says itself which run it has begun.
    given = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
    kept = id_file.read_text("utf-8").strip() if id_file.is_file() else None
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


def _keep_files_in(folder: RunFolder) -> None:
    """Have W&B keep what it is going to upload beside the run, unless the user chose a place.

    Otherwise it is in the home folder, and a run that is synced elsewhere lacks its tables.
    """
    if os.environ.get(_DATA_FOLDER) in (None, *_OWN_PLACES):
        os.environ[_DATA_FOLDER] = place = str(folder.wandb.resolve())
        _OWN_PLACES.add(place)
