"""What the doctor has said and done, kept in the run folder, the log and the loggers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlhf_lightning.doctor.catalog import ILLNESSES
from rlhf_lightning.doctor.interventions import Treatment
from rlhf_lightning.doctor.preflight_checks import Check
from rlhf_lightning.doctor.readings import HEALTHY, LEVELS, Transition
from rlhf_lightning.runs.doctor_log import DoctorEvent, event_from, write_events
from rlhf_lightning.runs.folder import RunFolder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """How the fit is to end.

    Args:
        kind: stop, or rollback.
        iteration: after which.
        reason: one sentence.
        checkpoint: iteration of the checkpoint that a rollback goes back to.
        remedy: what helps against the alarm.
    """

    kind: str
    iteration: int
    reason: str
    checkpoint: int | None = None
    remedy: str = ""


@dataclass
class MedicalRecord:
    """The events of a run, written to `doctor.jsonl` whenever one is added.

    Args:
        folder: the run folder.
        events: so far.
        idle: one for each detector that has had too little to watch so far. They are written
            behind the first event, which says what is watched.
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
        """Replace what is said of detectors that have had too little to watch: name -> why."""
        before = {event.name: event.message for event in self.idle}
        if before != dict(idle):
            self.idle = _idle_events(iteration, idle)
            self._write()

    def note_check(self, check: Check) -> None:
        """Add a check of the preflight."""
        level = "healthy" if check.passed else "alarm"
        self._tell(check.passed, f"preflight, {check.name}: {check.found}")
        remedy = "" if check.passed else check.fix
        self.events.append(DoctorEvent(0, "check", check.name, level, check.found, remedy=remedy))
        self._write()

    def note_alert(
        self, iteration: int, transition: Transition, loggers: Iterable[Any] = ()
    ) -> None:
        """Add an alert that was raised, changed or cleared, and tell loggers that take alerts."""
        illness = ILLNESSES[transition.detector]
        worse = transition.after > transition.before
        event = DoctorEvent(
            iteration,
            "alert",
            transition.detector,
            LEVELS[transition.after],
            transition.describe(),
            transition.reading.value,
            transition.threshold,
            illness.unit,
            illness.cause if transition.after != HEALTHY else "",
            illness.remedy if transition.after != HEALTHY else "",
        )
        self.events.append(event)
        advice = f". Usual cause: {illness.cause}. What helps: {illness.remedy}" if worse else ""
        self._tell(not worse, f"iteration {iteration}: {event.message}{advice}")
        if worse and self._writes:
            for each in loggers:
                alert = getattr(each, "alert", None)
                if alert is not None:
                    alert(illness.title, f"iteration {iteration}: {event.message}{advice}")
        self._write()

    def note_action(self, iteration: int, treatment: Treatment) -> None:
        """Add a change of a control."""
        told = (
            f"{treatment.control} from {treatment.before:g} to {treatment.after:g}, because of "
            f"{treatment.detector}"
        )
        self._tell(True, f"iteration {iteration}: {told}")
        changes = {treatment.control: [treatment.before, treatment.after]}
        self.events.append(
            DoctorEvent(iteration, "action", treatment.detector, "", told, changes=changes)
        )
        self._write()

    def note_end(self, iteration: int, kind: str, alarm: str, checkpoint: int | None) -> Request:
        """Add how the fit ends, and return it; without a checkpoint to go back to it stops."""
        illness = ILLNESSES[alarm]
        reason = f"the alarm {alarm} has stayed: {illness.title.lower()}"
        if kind == "rollback" and checkpoint is not None:
            told = f"{reason}; training goes back to the checkpoint of iteration {checkpoint}"
            event = DoctorEvent(iteration, "rollback", alarm, "alarm", told, value=checkpoint)
        else:
            missing = ""
            if kind == "rollback":
                missing = ", as there is no checkpoint from before an alarm to go back to"
            kind, checkpoint, told = "stop", None, f"{reason}; training stops{missing}"
            event = DoctorEvent(iteration, "stop", alarm, "alarm", told)
        self._tell(False, f"iteration {iteration}: {told}")
        self.events.append(event)
        self._write()
        return Request(kind, iteration, told, checkpoint, illness.remedy)

    def state(self) -> list[dict[str, Any]]:
        """Return the events as plain values."""
        return [asdict(event) for event in self.events]

    def load_state(self, state: Iterable[dict[str, Any]]) -> None:
        """Take the events of a checkpoint."""
        self.events = [event_from(content) for content in state]

    def _tell(self, well: bool, message: str) -> None:
        if self._writes:
            logger.log(logging.INFO if well else logging.WARNING, "doctor: %s", message)

    def _write(self) -> None:
        if self._writes:
            write_events(self.folder.doctor, [*self.events[:1], *self.idle, *self.events[1:]])


def _idle_events(iteration: int, idle: Mapping[str, str]) -> list[DoctorEvent]:
    return [DoctorEvent(iteration, "idle", name, "", why) for name, why in idle.items()]
