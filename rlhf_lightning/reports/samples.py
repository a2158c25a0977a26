"""Samples of a report: answers side by side, and what changed between them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from rlhf_lightning.reports.html import text
from rlhf_lightning.runs.metric_catalog import number

# A word or a sign, with the space behind it: spaces alone are nothing in common.
_PIECES = re.compile(r"\s+|\w+\s*|[^\w\s]\s*")
_WORD = re.compile(r"\w")
LONGEST = 1500  # pieces; comparing takes their product
_TOO_LITTLE = 0.3  # of the words in common: nothing is left to hold the change against


def marked(before: str, after: str) -> tuple[str, str]:
    """Return both texts as HTML, with `<del>` round what went and `<ins>` round what came.

    Texts that have little in common, or are very long, are returned without marks.
    """
    old, new = _PIECES.findall(before), _PIECES.findall(after)
    plain = text(before), text(after)
    if before == after or max(len(old), len(new)) > LONGEST:
        return plain
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    if _in_common(old, new, matcher) < _TOO_LITTLE:
        return plain
    left, right = [], []
    for tag, i, j, k, m in matcher.get_opcodes():
        gone, come = "".join(old[i:j]), "".join(new[k:m])
        if tag == "equal":
            left.append(text(gone))
            right.append(text(come))
            continue
        left.append(_wrapped("del", gone))
        right.append(_wrapped("ins", come))
    return "".join(left), "".join(right)


def _in_common(old: list[str], new: list[str], matcher: SequenceMatcher[str]) -> float:
    """Return the share of words that both have, in the same order."""
    words = sum(bool(_WORD.match(piece)) for piece in (*old, *new))
    same = sum(
        bool(_WORD.match(piece))
        for block in matcher.get_matching_blocks()
        for piece in old[block.a : block.a + block.size]
    )
    return 2 * same / max(words, 1)


def _wrapped(tag: str, piece: str) -> str:
    kept = piece.rstrip()
    if not kept:
        return text(piece)
    return f"<{tag}>{text(kept)}</{tag}>{text(piece[len(kept) :])}"


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
