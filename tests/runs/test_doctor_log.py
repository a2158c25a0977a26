"""`doctor.jsonl`, and what `summary.json` makes of it."""

from __future__ import annotations

from rlhf_lightning.runs.doctor_log import (
    DoctorEvent,
    actions_of,
    alerts_of,
    read_events,
    write_events,
)


def alert(iteration: int, level: str, name: str = "kl_high", value: float = 1.2) -> DoctorEvent:
    return DoctorEvent(
        iteration, "alert", name, level, f"{name} {level}", value, 1.0, "nats a token", "c", "r"
    )


EVENTS = [
    DoctorEvent(0, "watch", "kl_high,safety", "", "2 detectors watch"),
    alert(4, "warn"),
    alert(6, "alarm", value=2.5),
    DoctorEvent(6, "action", "kl_high", "", "kl_coef", changes={"kl_coef": [0.05, 0.1]}),
    alert(8, "warn", value=1.5),
    alert(11, "healthy", value=0.4),
    alert(15, "warn"),
    alert(16, "warn", "safety", 0.3),
]


def test_events_are_read_as_they_were_written(tmp_path):
    write_events(tmp_path / "doctor.jsonl", EVENTS)
    assert read_events(tmp_path / "doctor.jsonl") == EVENTS
    assert read_events(tmp_path / "nothing.jsonl") == []


def test_an_alert_that_comes_again_is_another_entry_with_its_worst_level():
    entries = alerts_of(EVENTS)
    told = [(e["detector"], e["raised_at"], e["cleared_at"], e["level"]) for e in entries]
    assert told == [
        ("kl_high", 4, 11, "alarm"),
        ("kl_high", 15, None, "warn"),
        ("safety", 16, None, "warn"),
    ]
    assert entries[0]["value"] == 2.5
    assert entries[0]["remedy"] == "r"


def test_alerts_before_a_rollback_are_not_cleared_by_what_comes_after_it():
    rollback = DoctorEvent(9, "rollback", "kl_high", "alarm", "back to 4", value=4)
    entries = alerts_of([alert(6, "alarm"), rollback, alert(6, "warn"), alert(8, "healthy")])
    assert [(e["raised_at"], e["cleared_at"]) for e in entries] == [(6, 9), (6, 8)]
    assert [a["kind"] for a in actions_of([rollback])] == ["rollback"]
