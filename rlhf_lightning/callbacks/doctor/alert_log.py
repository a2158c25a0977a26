"""The log of alerts and interventions, in the run folder, the log and the loggers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_lightning.doctor.catalog import DETECTORS
from rlhf_lightning.doctor.detectors import Transition
from rlhf_lightning.doctor.interventions import Intervention
from rlhf_lightning.doctor.preflight_checks import Check
from rlhf_lightning.doctor.spec import ALARM, HEALTHY, LEVELS
from rlhf_lightning.runs.doctor_log import DoctorEvent, write_events
from rlhf_lightning.runs.folder import RunFolder

logger = logging.getLogger(__name__)


@dataclass
class AlertLog:
    """The events of a run, written to `doctor.jsonl` whenever one is added.

    Args:
        folder: folder of the run.
        events: events so far.
        idle: one event for each detector that has had too little to watch so far. They are written
            after the first event, which says what is watched.
    """

    folder: RunFolder
    events: list[DoctorEvent] = field(default_factory=list)
    idle: list[DoctorEvent] = field(default_factory=list)
    _writes: bool = False

    def open(
        self, writes: bool, iteration: int, watched: Sequence[str], idle: Mapping[str, str]
    ) -> None:
        """Begin to write, on the first rank alone; what a kill left behind is replaced."""
        self._writes = writes
        if not any(event.kind == "watch" for event in self.events):
            told = f"{len(watched)} detectors watch from iteration {iteration + 1}"
            self.events.insert(0, DoctorEvent(iteration, "watch", ",".join(watched), "", told))
        self.idle = _idle_events(iteration, idle)
        self._write()

    def note_idle(self, iteration: int, idle: Mapping[str, str]) -> None:
        """Replace the notes on detectors that have had too little to watch: name -> why."""
        before = {event.name: event.message for event in self.idle}
        if before != dict(idle):
            self.idle = _idle_events(iteration, idle)
            self._write()

    def note_check(self, check: Check) -> None:
        """Add a check of the preflight."""
        level, remedy = ("healthy", "") if check.passed else ("alarm", check.fix)
        event = DoctorEvent(0, "check", check.name, level, check.found, remedy=remedy)
        self._add(event, f"preflight, {check.name}: {check.found}", warns=not check.passed)

    def note_alert(
        self,
        iteration: int,
        transition: Transition,
        loggers: Iterable[Any],
        advice: tuple[str, str],
    ) -> None:
        """Add an alert that was raised, changed or cleared, and send it to loggers that alert.

        The log has it briefly, with what helps on a second line.
        """
        spec = DETECTORS[transition.detector]
        worse = transition.after > transition.before
        level, told = LEVELS[transition.after], transition.describe()
        numbers = (transition.reading.value, transition.threshold)
        cause, remedy = ("", "") if transition.after == HEALTHY else advice
        about = (*numbers, spec.unit, cause, remedy)
        event = DoctorEvent(iteration, "alert", transition.detector, level, told, *about)
        brief = f"iteration {iteration}: {transition.describe(briefly=True)}"
        self._add(event, brief + f"\n  what helps: {remedy}" * worse, warns=worse)
        message = f"iteration {iteration}: {told}. Usual cause: {cause}. What helps: {remedy}"
        # W&B drops a second alert of one title within a minute: warning and alarm have their own.
        title = f"{spec.title} ({event.level})"
        for each in loggers if worse and self._writes else ():
            if (alert := getattr(each, "alert", None)) is not None:
                alert(title, message, "ERROR" if transition.after == ALARM else "WARN")

    def note_action(self, iteration: int, intervention: Intervention) -> None:
        """Add a change of a control."""
        detector, control = intervention.detector, intervention.control
        before, after = intervention.before, intervention.after
        told = f"{control} from {before:g} to {after:g}, because of {detector}"
        changes = {control: [before, after]}
        event = DoctorEvent(iteration, "action", detector, "", told, changes=changes)
        self._add(event, f"iteration {iteration}: {told}", warns=False)

    def note_end(
        self, iteration: int, kind: str, alarm: str, checkpoint: int | None
    ) -> DoctorEvent:
        """Add how the fit ends, and return it; without a checkpoint to go back to it stops."""
        reason = f"the alarm {alarm} has stayed: {DETECTORS[alarm].title.lower()}"
        if kind == "rollback" and checkpoint is not None:
            told = f"{reason}; training goes back to the checkpoint of iteration {checkpoint}"
            event = DoctorEvent(iteration, "rollback", alarm, "alarm", told, value=checkpoint)
        else:
            missing = ", as no checkpoint is from before an alarm" * (kind == "rollback")
            told = f"{reason}; training stops{missing}"
            event = DoctorEvent(iteration, "stop", alarm, "alarm", told)
        self._add(event, f"iteration {iteration}: {told}", warns=True)
        return event

    def _add(self, event: DoctorEvent, message: str, *, warns: bool) -> None:
        """Add an event, and on the first rank log and write it."""
        self.events.append(event)
        if self._writes:
            logger.log(logging.WARNING if warns else logging.INFO, "doctor: %s", message)
        self._write()

    def _write(self) -> None:
        if self._writes:
            write_events(self.folder.doctor, [*self.events[:1], *self.idle, *self.events[1:]])


def _idle_events(iteration: int, idle: Mapping[str, str]) -> list[DoctorEvent]:
    return [DoctorEvent(iteration, "idle", name, "", why) for name, why in idle.items()]
