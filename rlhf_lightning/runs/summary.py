"""`summary.json`: what a run was, how it ended and what it measured, for people and programs."""

from __future__ import annotations

import logging
import math
import platform
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.doctor_log import actions_of, alerts_of, read_events
from rlhf_lightning.runs.folder import RunFolder, to_json
from rlhf_lightning.runs.reading import parse

logger = logging.getLogger(__name__)
Status = Literal["running", "completed", "failed", "stopped"]
Metrics = Mapping[str, float | None]

_PACKAGES = ("rlhf_lightning", "torch", "lightning", "transformers", "hydra-core", "wandb")


@dataclass(frozen=True)
class GateResult:
    """The verdict of one gate.

    Args:
        name: what is demanded, e.g. `gold_win_rate`.
        value: what was measured; None where nothing could be.
        threshold: the bound that `value` was compared with.
        passed: whether the gate passed.
        reason: one sentence a reader understands without the configuration.
    """

    name: str
    value: float | None
    threshold: float | None
    passed: bool
    reason: str = ""

    @property
    def word(self) -> str:
        """`passed`, `NOT PASSED`, or `not measured` of an optional one."""
        if not self.passed:
            return "NOT PASSED"
        return "not measured" if None in (self.value, self.threshold) else "passed"


@dataclass(frozen=True)
class Summary:
    """The content of `summary.json`, with exactly these keys.

    Args:
        stage: the kind of run: the name of a stage, or of a command such as `collect`.
        status: `running` until the end is known; a killed run stays `running`.
        seed: the seed of the run.
        metrics: flat names to final values.
        gates: verdicts, in the order in which they were taken.
        seconds: wall-clock seconds by phase, e.g. `total`, `generate`.
        versions: package names to versions, and `python`.
        git_commit: commit of the working folder, None outside a repository.
        config_hash: hash of the configuration, from `runs.resume.config_hash`.
        cause: one line on why a run failed or was stopped; else None.
        alerts: the doctor's alerts, one each time a detector raised one, with cause and remedy.
        actions: the doctor's actions: changes of controls, stops and rollbacks.
        about: what was trained from what, on what and against what, in words.
        judged: False where the run only shows that it runs, as with `debug=fast`.
        title: the kind of run in words, such as "PPO"; by default the stage.
        warning: what makes all figures doubtful, in a sentence; "" where nothing does.
        next: what to do with what it made: a sentence, and on a second line a command for the shell
            and folder in which it was started; "" where a command line started nothing.
    """

    stage: str
    status: Status
    seed: int | None
    metrics: Metrics = field(default_factory=dict)
    gates: tuple[GateResult, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    config_hash: str | None = None
    cause: str | None = None
    alerts: tuple[Mapping[str, Any], ...] = ()
    actions: tuple[Mapping[str, Any], ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)
    judged: bool = True
    title: str = ""
    warning: str = ""
    next: str = ""

    def __post_init__(self) -> None:
        """Fill in the title."""
        object.__setattr__(self, "title", self.title or self.stage)

    @property
    def passed(self) -> bool:
        """True if every gate passed, or there is none."""
        return all(gate.passed for gate in self.gates)


def figure(metrics: Metrics, name: str) -> float | None:
    """Return a metric, None where it was not measured or is not finite."""
    value = metrics.get(name)
    return None if value is None or not math.isfinite(value) else float(value)


def new_summary(
    stage: str, *, seed: int | None, config_hash: str | None, title: str = ""
) -> Summary:
    """Return the summary of a run that begins: status `running`, versions and commit filled in."""
    return Summary(
        stage=stage,
        status="running",
        seed=seed,
        versions=installed_versions(),
        git_commit=git_commit(),
        config_hash=config_hash,
        title=title[:1].upper() + title[1:],
    )


def write_summary(folder: RunFolder, summary: Summary) -> Summary:
    """Write `summary.json` in one step; NaN and infinities become null.

    What the doctor has said and done is taken from `doctor.jsonl`, so that a run that fails has it;
    the summary with it is returned.
    """
    if events := read_events(folder.doctor):
        alerts, actions = tuple(alerts_of(events)), tuple(actions_of(events))
        summary = replace(summary, alerts=alerts, actions=actions)
    write_text(folder.summary, to_json(asdict(summary), indent=2) + "\n")
    return summary


def read_summary(folder: RunFolder) -> Summary:
    """Return the summary of a run.

    Raises:
        FileNotFoundError: if the folder has none.
        ValueError: if it is not what `write_summary` writes.
    """
    path = folder.summary
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {folder.path} is no run folder, or not begun")
    try:
        return parse(Summary, path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}): delete it, or restore it") from error


def summary_or_none(folder: RunFolder) -> Summary | None:
    """Return the summary of a run, None where there is none that can be read."""
    try:
        return read_summary(folder)
    except (OSError, ValueError):
        return None


def resumed(summary: Summary, folder: RunFolder) -> Summary:
    """Return the summary of a run that is resumed, with its seconds so far.

    Those of a process that was killed are not known. If the run was begun with another commit or
    other versions, which the summary will not have, that is logged.
    """
    if (before := summary_or_none(folder)) is None:
        return summary
    was, now = ({"commit": one.git_commit, **one.versions} for one in (before, summary))
    if other := [f"{name} {was[name]}" for name in was if was[name] != now.get(name)]:
        logger.warning("the run was begun with %s: it need not go on bit for bit", ", ".join(other))
    return replace(summary, seconds={"total": before.seconds.get("total", 0.0)})


def installed_versions(others: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of Python, of the packages that decide results, and of others."""
    versions = {"python": platform.python_version()}
    for package in (*_PACKAGES, *others):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def git_commit(folder: Path | None = None) -> str | None:
    """Return the commit of the working folder, with `-dirty` if tracked files differ, or None."""
    # Without tags, `describe` names the commit itself.
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10, "check": True}
    try:
        return str(subprocess.run(describe, cwd=folder or Path.cwd(), **how).stdout).strip()
    except (OSError, subprocess.SubprocessError):
        return None
