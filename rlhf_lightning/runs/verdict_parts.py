"""The pieces of a verdict: figures beside it, their words, and how they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlhf_lightning.runs.quantities import number, percent

Metrics = Mapping[str, float | None]
# `undecided`: an interval holds what the figure is held against.
Tone = Literal["good", "bad", "neutral", "undecided"]


@dataclass(frozen=True)
class Fact:
    """One figure beside the verdict.

    Args:
        label: what was measured.
        value: the figure as text.
        note: what to hold it against, or "".
    """

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a run.

    Args:
        tone: whether it is what one hoped for, gates and ending included.
        number_tone: the same of the one figure alone.
        number: the one figure that says most, as text; "" if nothing was measured.
        caption: what that figure is.
        sentence: what it means.
        facts: the other figures.
    """

    tone: Tone
    number: str
    caption: str
    sentence: str
    facts: tuple[Fact, ...]
    number_tone: Tone = "neutral"


def changes(metrics: Metrics, rival: str) -> list[Fact]:
    """Return what was measured of the policy and of the one it started from."""
    facts = []
    for key, label, unit in (
        ("score", "score", ""),
        ("gold", "gold reward", ""),
        ("exact_match", "exact matches", "share"),
        ("first_word_match", "right first words", "share"),
        ("solved", "right numbers", "share"),
        ("answered", "answers with a number", "share"),
        ("response_length", "response length", "tokens"),
        ("distinct_2", "distinct bigrams", "share"),
        ("refusal_rate", "harmful prompts refused", "share"),
        ("over_refusal_rate", "harmless look-alikes refused", "share"),
    ):
        value = get(metrics, f"val/{key}")
        if value is not None:
            before = get(metrics, f"val/baseline_{key}")
            facts.append(change(label, value, before, rival, unit))
    return facts


def change(label: str, value: float, before: float | None, rival: str, unit: str) -> Fact:
    """Return a figure before and after."""
    plain = "" if unit == "share" else unit
    if before is None:
        return Fact(label, percent(value) if unit == "share" else number(value), plain)
    if unit == "share":
        change = f"{percent(before)} → {percent(value)}"
    else:
        like = max(abs(before), abs(value))  # both with the digits that the larger one deserves
        change = f"{number(before, like=like)} → {number(value, like=like)}"
    return Fact(label, change, f"{rival} → now" + (f", {plain}" if plain else ""))


def interval(metrics: Metrics, name: str) -> str:
    """Return the interval of a share in brackets, "" where none was measured."""
    low, high = get(metrics, f"{name}_low"), get(metrics, f"{name}_high")
    if low is None or high is None:
        return ""
    return f" (95 % interval {100 * low:.1f} to {100 * high:.1f} %)"


def get(metrics: Metrics, name: str) -> float | None:
    """Return a figure, None where it was not measured or is not finite."""
    value = metrics.get(name)
    return None if value is None or not math.isfinite(value) else float(value)


def against(metrics: Metrics, name: str, rival: float) -> Literal["above", "below", "undecided"]:
    """Return where the whole interval of a figure lies; without one, where the figure does."""
    rate = get(metrics, name) or 0.0
    low, high = get(metrics, f"{name}_low"), get(metrics, f"{name}_high")
    if (rate if low is None else low) > rival:
        return "above"
    return "below" if (rate if high is None else high) < rival else "undecided"
