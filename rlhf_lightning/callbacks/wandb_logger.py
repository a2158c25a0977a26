"""Weights & Biases: offline without a login, never a prompt, never the end of a run."""

from __future__ import annotations

import hashlib
import logging
import netrc
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import wandb
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import ITERATION, RunFolder
from rlhf_lightning.runs.metric_catalog import FAMILIES, QUANTITIES
from rlhf_lightning.runs.secrets import redacted
from rlhf_lightning.runs.summary import GateResult

logger = logging.getLogger(__name__)

Mode = Literal["auto", "online", "offline", "disabled"]
MODES = ("auto", "online", "offline", "disabled")
_KEY_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def choose_mode(mode: Mode) -> Literal["online", "offline", "disabled"]:
    """Return the mode to use, without a network and without a prompt."""
    wanted: str = mode
    if mode == "auto":
        wanted = os.environ.get("WANDB_MODE", "online").lower()
        if wanted in ("dryrun", "shared"):
            wanted = "offline" if wanted == "dryrun" else "online"
    if wanted in ("disabled", "offline"):
        return "disabled" if wanted == "disabled" else "offline"
    if is_logged_in():
        return "online"
    if mode == "online":
        logger.warning(
            "logger.mode=online, but there is no login to Weights & Biases: running offline; "
            "set WANDB_API_KEY or run `wandb login`, and upload this run with `wandb sync`"
        )
    return "offline"


def is_logged_in() -> bool:
    """Return whether there is a key for the W&B host: in the environment or in the netrc file."""
    if any(os.environ.get(name) for name in _KEY_VARIABLES):
        return True
    base = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    host = urlparse(base).netloc or base
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        if path and (file := Path(path).expanduser()).is_file():
            try:
                found = netrc.netrc(str(file)).authenticators(host)
            except (netrc.NetrcParseError, OSError):
                continue
            if found and found[2]:
                return True
    return False


AlertLevel = Literal["INFO", "WARN", "ERROR"]
_NOT_METRICS = ("epoch", "step")
_DATA_FOLDER = "WANDB_DATA_DIR"
_OWN_PLACES: set[str] = set()  # of the runs of this process
_RUN_ID = "run_id"  # in wandb/ of the run folder
_GATE_COLUMNS = ("gate", "result", "value", "threshold", "reason")


class IterationWandbLogger(WandbLogger):
    """Lightning's logger with `iteration` as the x-axis of everything.

    If W&B cannot be reached, the run is recorded offline; if it cannot start or fails later, the
    run goes on without it: `metrics.csv` has the same numbers. A warning says so once. Needs
    `Trainer(log_every_n_steps=1)`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._wandb_init.pop("anonymous", None)  # deprecated by wandb, and warned about
        self._failed = False

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run; one that records nothing if W&B cannot start."""
        if self._experiment is None:
            try:
                self._experiment = self._start(**self._wandb_init)
            except Exception as error:  # any failure of a service must not end hours of training
                self._start_offline(error)
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log one row.

        Args:
            metrics: names to numbers.
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
        self.guarded(lambda: self.experiment.alert(title, redacted(text), level))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Add to the configuration of the W&B run."""
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
            for gate in gates:
                if gate.word != "not measured":
                    run.summary[f"gates/{gate.name}"] = int(gate.passed)
            run.finish(exit_code=exit_code)

        failed = [gate for gate in gates if not gate.passed]
        if failed:
            title = f"{len(failed)} of {len(gates)} gates failed"
            self.alert(title, "\n".join(f"{g.name}: {g.reason}" for g in failed))
        self.guarded(close)
        self._experiment = None
        self._failed = True  # nothing may open a second run afterwards

    def _start(self, **settings: Any) -> Any:
        if self._failed:
            return DummyLogger().experiment
        run = wandb.init(**settings)
        run.define_metric(ITERATION)
        # Each by its name: then the workspace shows its x-axis, and a new name has it too.
        families = [f for f in FAMILIES if f.index("*") == len(f) - 1]  # as W&B wants them
        for name in (*QUANTITIES, *families, "*"):
            run.define_metric(name, step_metric=ITERATION)
        return run

    def _start_offline(self, error: Exception) -> None:
        if self._wandb_init.get("mode") != "online":
            self._give_up(error)
            return
        # The service still holds the name of the run that could not start.
        self._wandb_init |= {"mode": "offline", "id": f"{self._wandb_init['id']}-offline"}
        try:
            self._experiment = self._start(**self._wandb_init)
        except Exception as second:  # see `experiment`
            self._give_up(second)
            return
        logger.warning(
            "Weights & Biases cannot be reached (%s): the run is recorded offline, upload it with "
            "wandb sync %s",
            " ".join(str(error).split()),
            Path(self._experiment.dir).parent,
        )

    def guarded(self, action: Any) -> None:
        """Do something with the W&B run; if it fails, the run goes on without W&B."""
        if self._failed:
            return
        try:
            action()
        except Exception as error:  # see `experiment`
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if not self._failed:
            logger.warning(
                "Weights & Biases does not work (%s: %s): the run goes on without it, its numbers "
                "are in metrics.csv; logger=none turns it off",
                type(error).__name__,
                error,
            )
        self._failed = True
        nothing: Any = DummyLogger().experiment
        self._experiment = nothing


def wandb_logger(
    folder: RunFolder,
    *,
    project: str = "rlhf_lightning",
    name: str | None = None,
    group: str | None = None,
    tags: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    mode: Mode = "auto",
) -> IterationWandbLogger:
    """Return the logger of a run; what it writes stands in `wandb/` of the run folder.

    Args:
        folder: the run folder; it keeps the id of the W&B run, so that a resumed run continues the
            same one: online the curves go on, offline there is a second segment with the same id.
        project: W&B project.
        name: display name, the name of the run folder by default.
        group: W&B group.
        tags: W&B tags.
        config: the configuration as plain values.
        mode: `auto` is online with a login and if `WANDB_MODE` does not say
            otherwise, else offline; `online` without a key is offline with a warning.

    Raises:
        ValueError: for an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"logger.mode={mode!r}, expected one of {', '.join(MODES)}")
    chosen = choose_mode(mode)
    command = " ".join(sys.argv)
    _keep_files_in(folder)
    # W&B asks on the terminal when it finds no key; offline it never does.
    return IterationWandbLogger(
        project=project,
        name=name or folder.name,
        group=group,
        tags=list(tags),
        config=dict(config or {}),
        save_dir=str(folder.create().path),
        id=run_id(folder),
        mode=chosen,
        reinit="create_new",
        settings=wandb.Settings(
            silent=True,
            console="off",
            show_errors=False,
            show_warnings=False,
            init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", 30)),
            # W&B notes the command line, whatever stands in it.
            x_disable_meta=redacted(command) != command,
        ),
    )


def _keep_files_in(folder: RunFolder) -> None:
    """Have W&B keep what it is going to upload beside the run, unless the user chose a place.

    Otherwise it stands in the home folder, and a run that is synced elsewhere lacks its tables.
    """
    place = os.environ.get(_DATA_FOLDER)
    if place is None or place in _OWN_PLACES:
        place = str(folder.wandb.resolve())
        _OWN_PLACES.add(place)
        os.environ[_DATA_FOLDER] = place


def run_id(folder: RunFolder) -> str:
    """Return the id of the W&B run of a run folder: that of its first start, wherever it is now.

    An agent of a W&B sweep says itself which run it has begun.
    """
    if os.environ.get("WANDB_SWEEP_ID") and (given := os.environ.get("WANDB_RUN_ID")):
        return given
    path = folder.wandb / _RUN_ID
    if path.is_file() and (kept := path.read_text("utf-8").strip()):
        return kept
    identity = hashlib.sha256(str(folder.path.resolve()).encode()).hexdigest()[:10]
    new = f"{re.sub('[^A-Za-z0-9_-]', '-', folder.name)}-{identity}"
    if getattr(rank_zero_only, "rank", 0) == 0:
        write_text(path, f"{new}\n")
    return new
