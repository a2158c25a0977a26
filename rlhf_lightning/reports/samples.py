"""Samples of a report: answers side by side, and what changed between them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from markupsafe import Markup

from rlhf_lightning.reports.charts import render, text
from rlhf_lightning.runs.metric_catalog import number

# A word or a sign, with the space behind it: spaces alone are nothing in common.
_PIECES = re.compile(r"\s+|\w+\s*|[^\w\s]\s*")
_WORD = re.compile(r"\w")
LONGEST = 1500  # pieces; comparing takes their product
_MAX_PAIRS, _MAX_ENDS = 12, 4
_TOO_LITTLE = 0.3  # of the words in common: nothing is left to hold the change against


def marked(before: str, after: str) -> tuple[Markup, Markup]:
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
    left, right = Markup(), Markup()
    for tag, i, j, k, m in matcher.get_opcodes():
        gone, come = "".join(old[i:j]), "".join(new[k:m])
        left += text(gone) if tag == "equal" else _wrapped("del", gone)
        right += text(come) if tag == "equal" else _wrapped("ins", come)
    return left, right


def _in_common(old: list[str], new: list[str], matcher: SequenceMatcher[str]) -> float:
    """Return the share of words that both have, in the same order."""
    words = sum(bool(_WORD.match(piece)) for piece in (*old, *new))
    same = sum(
        bool(_WORD.match(piece))
        for block in matcher.get_matching_blocks()
        for piece in old[block.a : block.a + block.size]
    )
    return 2 * same / max(words, 1)


def _wrapped(tag: str, piece: str) -> Markup:
    kept = piece.rstrip()
    marks = Markup(f"<{tag}>{text(kept)}</{tag}>") if kept else Markup()
    return marks + text(piece[len(kept) :])


def samples_section(samples: Sequence[dict[str, Any]]) -> str:
    """Return responses beside those of the policy it started from, or else the best and worst."""
    compared = [s for s in samples if s.get("baseline_response") is not None]
    if not samples:
        return ""
    last = max(s["iteration"] for s in compared or samples)
    latest = [s for s in compared or samples if s["iteration"] == last]
    sides = ("before", "after") if last else ("baseline", "policy")  # of an evaluation
    cards, css = [_card(s, sides=sides) for s in latest[:_MAX_PAIRS]], ""
    scored = sorted((s for s in latest if _is_number(s.get("score"))), key=lambda s: -s["score"])
    if compared:
        lead = (
            "Held-out prompts with the response of each side, not selected. Red words are only in "
            "the first response, green words only in the second; two that share little are plain."
        )
    elif len(scored) < 2:
        lead = f"From iteration {last}."
    else:
        count = min(_MAX_ENDS, len(scored) // 2)
        ends = zip(scored[:count], scored[: -count - 1 : -1], strict=True)
        cards = [_card(*one) for pair in ends for one in zip(pair, ("best", "worst"), strict=True)]
        lead, css = f"From iteration {last}: {count} with the highest score and the lowest.", "ends"
    systems = {str(s.get("system") or "") for s in latest}
    system = systems.pop() if len(systems) == 1 else ""
    for card, sample in zip(cards, latest, strict=False) if compared and not system else ():
        card["system"] = str(sample.get("system") or "")
    return render("samples.html", lead=lead, cards=cards, css=css, system=system)


def _card(
    sample: Mapping[str, Any], place: str = "", sides: tuple[str, str] = ("", "")
) -> dict[str, Any]:
    now = text(sample.get("response", ""))
    answers: list[tuple[str, ...]] = []
    if sample.get("baseline_response") is not None:
        was, now = marked(str(sample["baseline_response"]), str(sample.get("response", "")))
        answers = [(sides[0], figures(sample, "baseline_"), was)]
    answers.append((sides[1] if answers else "", figures(sample, ""), now, "now"))
    return {
        "prompt": sample.get("prompt", ""),
        "tag": " · ".join(filter(None, (place, str(sample.get("domain") or "")))),
        "answers": answers,
    }


def figures(sample: Mapping[str, Any], prefix: str) -> str:
    """Return score, KL and length of an answer as text; `prefix` names whose they are."""
    parts = []
    for key, name in (("score", "score"), ("kl", "KL estimate a token"), ("length", "tokens")):
        value: Any = sample.get(f"{prefix}{key}")
        if _is_number(value):
            parts.append(f"{name} {value if key == 'length' else number(value)}")
    if sample.get(f"{prefix}finished") is False:
        parts.append("cut off")
    return " · ".join(parts)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
