"""Samples of a report: answers side by side, and what changed between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_lightning.reports.markup import text
from rlhf_lightning.reports.words import marked
from rlhf_lightning.runs.quantities import number

Samples = Sequence[dict[str, Any]]

_MAX_PAIRS = 12
_MAX_ENDS = 4


def samples_section(samples: Samples) -> str:
    """Return responses beside those of the policy it started from, or else the best and worst."""
    if not any(s.get("score") or s.get("baseline_score") for s in samples):
        samples = [s | {"score": None, "baseline_score": None} for s in samples]  # nobody scored
    compared = [s for s in samples if s.get("baseline_response") is not None]
    if compared:
        last = max(s["iteration"] for s in compared)
        shown = [s for s in compared if s["iteration"] == last][:_MAX_PAIRS]
        cards = "".join(_card(s) for s in shown)
        lead = (
            "The same held-out prompts, answered before and after the training, not selected. "
            "Words that went are red, words that came are green, where the two are comparable."
        )
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
    before, now = "", text(sample.get("response", ""))
    if sample.get("baseline_response") is not None:
        was, now = marked(str(sample["baseline_response"]), str(sample.get("response", "")))
        before = answer("before", figures(sample, "baseline_"), was, "")
    after = answer("after" if before else "", figures(sample, ""), now, " now")
    return (
        '<article class="sample"><p class="prompt free" dir="auto">'
        f'{text(sample.get("prompt", ""))}</p><p class="tag">{tag}</p>'
        f'<div class="pair">{before}{after}</div></article>'
    )


def answer(title: str, facts: str, content: str, css: str) -> str:
    """Return one answer as a box.

    Args:
        title: who said it, or when.
        facts: its score and such, as text.
        content: the answer as HTML.
        css: further classes, each after a space.
    """
    empty = '<p class="empty">nothing</p>'
    body = f'<p class="free" dir="auto">{content}</p>' if content.strip() else empty
    head = " · ".join(part for part in (title, facts) if part)
    return f'<div class="answer{css}"><h3>{text(head)}</h3>{body}</div>'


def figures(sample: Mapping[str, Any], prefix: str) -> str:
    """Return score, KL and length of an answer as text; `prefix` names whose they are."""
    parts = []
    for key, pattern in (("score", "score {}"), ("kl", "KL {} a token"), ("length", "{} tokens")):
        value: Any = sample.get(f"{prefix}{key}")
        if _is_number(value):
            parts.append(pattern.format(value if key == "length" else number(value)))
    if sample.get(f"{prefix}finished") is False:
        parts.append("cut off")
    return " · ".join(parts)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
