"""The parts of a report besides its curves and samples: verdict, gates, times, settings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_lightning.doctor.catalog import DETECTORS
from rlhf_lightning.reports.html import text
from rlhf_lightning.runs.changes import read_changes
from rlhf_lightning.runs.doctor_log import DoctorEvent, actions_of, alerts_of, coverage_of
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.metric_catalog import duration, number, percent, quantity
from rlhf_lightning.runs.summary import Summary
from rlhf_lightning.runs.verdict import STAGES, verdict

_STATUS_TONE = {"completed": "good", "failed": "bad", "stopped": "neutral", "running": "neutral"}
# Of `seconds` of a summary, what is outside of the iterations.
_PHASES = {
    "setup": "loading",
    "measure": "final evaluation",
    "export": "exporting",
    "answers": "answering",
    "judges": "judging",
}
_OTHER = "everything else"
_MOST_PARTS, _LEAST_SHARE = 6, 0.005
_SECRET = re.compile(
    r"(?im)^(\s*(?:-\s+)?[\w.]*(?:api_?key|secret|password|access_token|auth_token)[\w.]*\s*[:=]\s*)\S.*$"
)


def verdict_section(summary: Summary, folder: RunFolder) -> str:
    """Return the top of the page: what was learnt, in one figure and one sentence."""
    result = verdict(summary)
    tone = _STATUS_TONE[summary.status]
    seed = "" if summary.seed is None else f"<span>seed {text(summary.seed)}</span>"
    figure = ""
    if result.number:
        figure = (
            f'<p class="figure {result.number_tone}">{text(result.number)}</p>'
            f'<p class="caption">{text(result.caption)}</p>'
        )
    facts = "".join(
        f"<div><dt>{text(f.label)}</dt><dd>{_unbroken(f.value)}"
        + (f"<small>{text(f.note)}</small>" if f.note else "")
        + "</dd></div>"
        for f in result.facts
    )
    stage = text(STAGES.get(summary.stage, summary.stage))
    sentence = f'<h1 class="sentence">{text(result.sentence) or stage}</h1>'
    return (
        f'<header><div class="overline"><strong>{stage}</strong>'
        f'<span>{text(folder.name)}</span>{seed}<span class="status {tone}">'
        f"{text(summary.status)}</span>{_gates_in_short(summary)}</div>"
        f'<div class="hero">{figure}{sentence}</div>'
        + (f'<dl class="facts">{facts}</dl>' if facts else "")
        + f"</header>{_gates(summary)}"
    )


def _unbroken(value: str) -> str:
    """Keep a number and its percent sign on one line; the arrow may begin another."""
    return text(value).replace(" %", "&nbsp;%")


def _gates_in_short(summary: Summary) -> str:
    failed, total = sum(not gate.passed for gate in summary.gates), len(summary.gates)
    if not total:
        return ""
    if failed:
        return f'<span class="status bad">{failed} of {total} gates failed</span>'
    return f'<span class="status good">{total} gate{"s" * (total > 1)} passed</span>'


def _gates(summary: Summary) -> str:
    if not summary.gates:
        return ""
    rows = []
    for gate in summary.gates:
        word, tone = ("✓ passed", "good") if gate.passed else ("✗ failed", "bad")
        reason = gate.reason
        if not reason and gate.value is not None and gate.threshold is not None:
            reason = f"{number(gate.value)} against {number(gate.threshold)}"
        rows.append(
            f'<li><span class="word {tone}">{word}</span><b>{text(gate.name)}</b>'
            f"<p>{text(reason)}</p></li>"
        )
    return f'<section><h2>Gates</h2><ul class="gates">{"".join(rows)}</ul></section>'


def times_section(rows: Sequence[Mapping[str, float]], summary: Summary | None) -> str:
    """Return where the time went, "" if no phase was timed."""
    seconds_of = summary.seconds if summary else {}
    times: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("time/") and math.isfinite(value):
                label = quantity(name).label
                times[label] = times.get(label, 0.0) + value
    times |= {label: seconds_of[key] for key, label in _PHASES.items() if key in seconds_of}
    known = sum(times.values())
    if known <= 0:
        return ""
    # A run that was resumed has the iterations of every process, and the clock of the last one.
    whole = max(known, seconds_of.get("total", 0.0))
    parts = sorted(times.items(), key=lambda part: -part[1])
    shown = [part for part in parts[:_MOST_PARTS] if part[1] > _LEAST_SHARE * whole]
    rest = whole - sum(seconds for _, seconds in shown)
    rest_label = "reading data, checkpoints, logs" if "fit" in seconds_of else _OTHER
    if rest > _LEAST_SHARE * whole:
        shown.append((rest_label, rest))
    bars, keys = [], []
    for index, (label, seconds) in enumerate(shown):
        share = seconds / whole
        css = "rest" if label == rest_label else f"t{index}"
        bars.append(f'<i class="{css}" style="width:{100 * share:.2f}%"></i>')
        keys.append(
            f'<li><i class="{css}"></i>{text(label)} <span>{duration(seconds)} · {percent(share)}'
            "</span></li>"
        )
    return (
        f'<section><h2>Time</h2><p class="lead">{duration(whole)} in all.</p>'
        f'<div class="times">{"".join(bars)}</div>'
        f'<ul class="key-list">{"".join(keys)}</ul></section>'
    )


def settings_section(summary: Summary | None, folder: RunFolder) -> str:
    """Return seed, versions, commit, what differs from the experiment, and the configuration.

    The configuration is folded and without its secrets.
    """
    items: list[tuple[str, object]] = []
    if summary is not None:
        items = [
            ("seed", summary.seed),
            ("commit", (summary.git_commit or "")[:12]),
            ("configuration", summary.config_hash),
            ("versions", ", ".join(f"{k} {v}" for k, v in summary.versions.items())),
        ]
    rows = "".join(
        f"<dt>{text(name)}</dt><dd>{text(value)}</dd>"
        for name, value in items
        if value not in (None, "")
    )
    files = ""
    for title, path in (
        ("Overrides of this run", folder.config.with_name("overrides.yaml")),
        ("The whole configuration", folder.config),
    ):
        if path.is_file():
            content = _SECRET.sub(r"\1(hidden)", path.read_text("utf-8", errors="replace")).strip()
            if content not in ("", "[]"):
                files += f"<details><summary>{title}</summary><pre>{text(content)}</pre></details>"
    if not rows and not files:
        return ""
    return (
        f'<section><h2>Settings</h2><dl class="settings">{rows}</dl>{_changes(folder)}{files}'
        "</section>"
    )


def _changes(folder: RunFolder) -> str:
    changes = read_changes(folder)
    if changes is None:
        return ""
    if not changes:
        return '<p class="lead">Everything but the seed is as the experiment is shipped.</p>'
    rows = "".join(
        f"<tr><td><code>{text(c.key)}</code></td>"
        f'<td class="was">{text(c.default)}</td><td>{text(c.value)}</td></tr>'
        for c in changes
    )
    return (
        '<div class="wide"><table><tr><th>differs from the experiment as shipped</th>'
        f"<th>shipped</th><th>this run</th></tr>{rows}</table></div>"
    )


_TONES = {"warn": "neutral", "alarm": "bad"}


def doctor_section(events: Sequence[DoctorEvent]) -> str:
    """Return alerts with cause and remedy, actions and the preflight; "" without a doctor."""
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
        end = "." if told.startswith("None") else ", none of them found anything."
        return f"{told}{end}" if coverage.idle else f"{told}, none found anything."
    found = sorted({str(alert["detector"]) for alert in alerts})
    known = [DETECTORS[name].title.lower() if name in DETECTORS else name for name in found]
    return f"{told}; {len(found)} found something: {', '.join(known)}."


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
