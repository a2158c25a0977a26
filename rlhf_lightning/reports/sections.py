"""The parts of a report besides its curves: verdict, gates, samples, times, settings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_lightning.reports.markup import text
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.quantities import duration, number, percent, quantity
from rlhf_lightning.runs.summary import Summary
from rlhf_lightning.runs.verdict import STAGES, verdict

Samples = Sequence[Mapping[str, Any]]

_MAX_PAIRS = 12
_MAX_ENDS = 4
_STATUS_TONE = {"completed": "good", "failed": "bad", "stopped": "neutral", "running": "neutral"}
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
        f"<div><dt>{text(f.label)}</dt><dd>{text(f.value)}"
        + (f"<small>{text(f.note)}</small>" if f.note else "")
        + "</dd></div>"
        for f in result.facts
    )
    sentence = f'<h1 class="sentence">{text(result.sentence or STAGES[summary.stage])}</h1>'
    return (
        f'<header><div class="overline"><strong>{text(STAGES[summary.stage])}</strong>'
        f'<span>{text(folder.name)}</span>{seed}<span class="status {tone}">'
        f"{text(summary.status)}</span>{_gates_in_short(summary)}</div>"
        f'<div class="hero">{figure}{sentence}</div>'
        + (f'<dl class="facts">{facts}</dl>' if facts else "")
        + f"</header>{_gates(summary)}"
    )


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


def samples_section(samples: Samples) -> str:
    """Return responses beside those of the policy it started from, or else the best and worst."""
    compared = [s for s in samples if s.get("baseline_response") is not None]
    if compared:
        last = max(s["iteration"] for s in compared)
        shown = [s for s in compared if s["iteration"] == last][:_MAX_PAIRS]
        cards = "".join(_card(s) for s in shown)
        lead = "The same prompts, answered before and after the training, not selected."
        return _samples(lead, cards)
    if not samples:
        return ""
    last = max(s["iteration"] for s in samples)
    latest = [s for s in samples if s["iteration"] == last]
    scored = sorted((s for s in latest if _is_number(s.get("score"))), key=lambda s: -s["score"])
    if len(scored) < 2:
        return _samples(f"From iteration {last}.", "".join(_card(s) for s in latest[:_MAX_PAIRS]))
    count = min(_MAX_ENDS, len(scored) // 2)
    ends = zip(scored[:count], scored[: -count - 1 : -1], strict=True)
    cards = "".join(_card(best, "best") + _card(worst, "worst") for best, worst in ends)
    lead = (
        f"From iteration {last}: the {count} with the highest score, the {count} with the lowest."
    )
    return _samples(lead, cards, " ends")


def _samples(lead: str, cards: str, css: str = "") -> str:
    return (
        f'<section><h2>Samples</h2><p class="lead">{text(lead)}</p>'
        f'<div class="samples{css}">{cards}</div></section>'
    )


def _card(sample: Mapping[str, Any], place: str = "") -> str:
    tags = [place, str(sample.get("domain") or "")]
    tag = " · ".join(text(t) for t in tags if t)
    before = ""
    if sample.get("baseline_response") is not None:
        figures = _figures(sample, "baseline_")
        before = _answer("before", figures, sample["baseline_response"], "")
    now = _answer(
        "after" if before else "", _figures(sample, ""), sample.get("response", ""), " now"
    )
    return (
        '<article class="sample"><p class="prompt free" dir="auto">'
        f'{text(sample.get("prompt", ""))}</p><p class="tag">{tag}</p>'
        f'<div class="pair">{before}{now}</div></article>'
    )


def _answer(title: str, figures: str, response: object, css: str) -> str:
    body = (
        f'<p class="free" dir="auto">{text(response)}</p>'
        if str(response).strip()
        else '<p class="empty">nothing</p>'
    )
    head = " · ".join(part for part in (title, figures) if part)
    return f'<div class="answer{css}"><h3>{text(head)}</h3>{body}</div>'


def _figures(sample: Mapping[str, Any], prefix: str) -> str:
    parts = []
    for key, pattern in (("score", "score {}"), ("kl", "KL {} a token"), ("length", "{} tokens")):
        value: Any = sample.get(f"{prefix}{key}")
        if _is_number(value):
            parts.append(pattern.format(value if key == "length" else number(value)))
    if sample.get(f"{prefix}finished") is False:
        parts.append("cut off")
    return " · ".join(parts)


def times_section(rows: Sequence[Mapping[str, float]], summary: Summary | None) -> str:
    """Return where the time went, "" if no phase was timed."""
    phases: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("time/") and math.isfinite(value):
                phases[name] = phases.get(name, 0.0) + value
    total = sum(phases.values())
    if total <= 0:
        return ""
    parts = [(quantity(name).label, seconds) for name, seconds in phases.items()]
    parts = sorted(parts, key=lambda part: -part[1])[:3]
    whole = max(total, (summary.seconds if summary else {}).get("total", 0.0))
    rest = whole - sum(seconds for _, seconds in parts)
    if rest > 0.005 * whole:
        parts.append(("everything else", rest))
    bars, keys = [], []
    for index, (label, seconds) in enumerate(parts):
        share = seconds / whole
        css = "t3" if label == "everything else" else f"t{index}"
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
    """Return seed, versions, commit and, folded, the configuration without its secrets."""
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
    return f'<section><h2>Settings</h2><dl class="settings">{rows}</dl>{files}</section>'


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
