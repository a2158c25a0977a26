"""The part of a report that says what the doctor found and did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_lightning.evaluation.doctor.illnesses import ILLNESSES
from rlhf_lightning.reports.markup import text
from rlhf_lightning.runs.doctor_log import DoctorEvent, actions_of, alerts_of, coverage_of

_TONES = {"warn": "neutral", "alarm": "bad"}


def doctor_section(events: Sequence[DoctorEvent]) -> str:
    """Return alerts with cause and remedy, actions and the preflight; "" if nobody watched."""
    if not events:
        return ""
    alerts, actions = alerts_of(events), actions_of(events)
    checks = [event for event in events if event.kind == "check"]
    rows = [_check(check) for check in checks]
    rows += [_alert(alert) for alert in alerts]
    rows += [_action(action) for action in actions]
    coverage = coverage_of(events)
    rows += [_idle(why, names) for why, names in (coverage.idle if coverage else {}).items()]
    listed = f'<ul class="gates">{"".join(rows)}</ul>' if rows else ""
    lead = text(_lead(events, alerts))
    return f'<section><h2>Doctor</h2><p class="lead">{lead}</p>{listed}</section>'


def _lead(events: Sequence[DoctorEvent], alerts: Sequence[Mapping[str, Any]]) -> str:
    coverage = coverage_of(events)
    if coverage is None:
        return "The run did not begin."
    told = coverage.describe()
    if not alerts:
        found = "." if told.startswith("None") else ", none of them found anything."
        return f"{told}{found}" if coverage.idle else f"{told}, none found anything."
    ill = sorted({str(alert["detector"]) for alert in alerts})
    names = ", ".join(ILLNESSES[name].title.lower() if name in ILLNESSES else name for name in ill)
    return f"{told}; {len(ill)} found something: {names}."


def _idle(why: str, names: Sequence[str]) -> str:
    return _row("idle", "undecided", ", ".join(names), [f"{why[:1].upper()}{why[1:]}."])


def _check(check: DoctorEvent) -> str:
    passed = check.level == "healthy"
    word, tone = ("✓ passed", "good") if passed else ("✗ failed", "bad")
    return _row(word, tone, f"preflight: {check.name}", [check.message, check.remedy])


def _alert(alert: Mapping[str, Any]) -> str:
    level, end = str(alert["level"]), alert["cleared_at"]
    until = "to the end" if end is None else f"to {end}"
    when = f"iterations {alert['raised_at']} {until}"
    paragraphs = [str(alert["message"])]
    paragraphs += [f"Usual cause: {alert['cause']}.", f"What helps: {alert['remedy']}."]
    return _row(level, _TONES.get(level, "neutral"), when, paragraphs)


def _action(action: Mapping[str, Any]) -> str:
    where = f"iteration {action['iteration']}"
    return _row(str(action["kind"]), "neutral", where, [str(action["message"])])


def _row(word: str, tone: str, name: str, paragraphs: Sequence[str]) -> str:
    body = "<br>".join(text(part) for part in paragraphs if part)
    return f'<li><span class="word {tone}">{text(word)}</span><b>{text(name)}</b><p>{body}</p></li>'
