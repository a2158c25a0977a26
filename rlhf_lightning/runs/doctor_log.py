"""`doctor.jsonl`: alerts, checks and interventions of a run, an event a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import to_json
from rlhf_lightning.runs.reading import parse

Kind = Literal["watch", "check", "alert", "action", "stop", "rollback", "idle"]


@dataclass(frozen=True)
class DoctorEvent:
    """One alert, check or intervention.

    Args:
        iteration: the iteration, from 1, at whose end it happened; 0 before the first.
        kind: `watch` (what is watched), `check` (of the preflight), `alert` (raised, changed or
            cleared), `action`, `stop`, `rollback`, or `idle`: a detector that has had too little to
            watch so far, with why. Events of kind `idle` follow `watch`.
        name: the detector or check.
        level: `warn`, `alarm`, or `healthy` for an alert that was cleared and a check that passed.
        message: one sentence with value, unit and threshold.
        value, threshold: the numbers; None where there are none.
        unit: the unit of both numbers.
        cause: the usual cause.
        remedy: the recommended fix, one sentence.
        changes: the controls that an action changed, control -> [before, after].
    """

    iteration: int
    kind: Kind
    name: str
    level: str
    message: str
    value: float | None = None
    threshold: float | None = None
    unit: str = ""
    cause: str = ""
    remedy: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)


def write_events(path: Path | str, events: Iterable[DoctorEvent]) -> None:
    """Write all events of a run in one step."""
    write_text(Path(path), "".join(to_json(asdict(event)) + "\n" for event in events))


def read_events(path: Path | str) -> list[DoctorEvent]:
    """Return the events of a run; none where there is no file.

    Raises:
        ValueError: if it is not what `write_events` writes.
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        return [parse(DoctorEvent, line) for line in path.read_bytes().split(b"\n") if line.strip()]
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}): restore it, or move it away") from error


@dataclass(frozen=True)
class Coverage:
    """The detectors that could have raised an alert, and the others.

    Args:
        total: number of detectors of the run.
        idle: why -> those that could not, for that reason.
    """

    total: int
    idle: Mapping[str, tuple[str, ...]]

    def describe(self) -> str:
        """Return how many watched, as the beginning of a sentence."""
        watched = self.total - sum(len(names) for names in self.idle.values())
        if watched == self.total:
            return f"{self.total} detectors watched"
        few = "None" if watched == 0 else str(watched)
        return f"{few} of {self.total} detectors had enough to watch"


def coverage_of(events: Iterable[DoctorEvent]) -> Coverage | None:
    """Return which detectors watched, None where the run had no doctor, or did not begin."""
    events = list(events)
    watched = [event for event in events if event.kind == "watch"]
    if not watched:
        return None
    idle: dict[str, tuple[str, ...]] = {}
    for event in events:
        if event.kind == "idle":
            idle[event.message] = (*idle.get(event.message, ()), event.name)
    return Coverage(len(watched[0].name.split(",")), idle)


_OF_ALERTS = ("level", "value", "threshold", "unit", "message", "cause", "remedy")


def alerts_of(events: Iterable[DoctorEvent]) -> list[dict[str, Any]]:
    """Return one entry for each time that a detector raised an alert, in order.

    `level` is the worst that was reached, with the value and the bound of that moment;
    `cleared_at` is None for one that was there at the end, and where training went back the
    iteration from which it did.
    """
    entries: list[dict[str, Any]] = []
    open_entries: dict[str, dict[str, Any]] = {}
    for event in events:
        if event.kind == "rollback":
            for entry in open_entries.values():
                entry["cleared_at"] = event.iteration
            open_entries = {}
        if event.kind != "alert":
            continue
        if event.level == "healthy":
            open_entries.pop(event.name, {})["cleared_at"] = event.iteration
            continue
        if event.name not in open_entries:
            begun = {"detector": event.name, "raised_at": event.iteration, "cleared_at": None}
            entries.append(begun)
            open_entries[event.name] = begun
        entry = open_entries[event.name]
        if entry.get("level") != "alarm":
            entry |= {name: getattr(event, name) for name in _OF_ALERTS}
    return entries


def actions_of(events: Iterable[DoctorEvent]) -> list[dict[str, Any]]:
    """Return the interventions: changes of controls, stops and rollbacks."""
    return [
        {
            "iteration": event.iteration,
            "kind": event.kind,
            "detector": event.name,
            "changes": dict(event.changes),
            "message": event.message,
        }
        for event in events
        if event.kind in ("action", "stop", "rollback")
    ]
