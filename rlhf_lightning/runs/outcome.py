"""The parts of a verdict: figures, what lies beside them, and whether an interval decides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlhf_lightning.runs.metric_catalog import counted, ends, percent

Metrics = Mapping[str, float | None]
FEW = 30  # prompts or pairs, below which a figure is no headline
# `undecided`: the threshold lies inside the confidence interval.
Tone = Literal["good", "bad", "neutral", "undecided"]


@dataclass(frozen=True)
class Fact:
    """One figure beside the verdict.

    Args:
        label: name of the figure.
        value: the figure as text.
        note: what to compare it with, or "".
    """

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a run.

    Args:
        tone: good or bad, gates and ending included.
        number: the headline figure as text; "" if nothing was measured.
        caption: the name of that figure.
        sentence: what the figure means, in one sentence.
        facts: the other figures, in order.
        number_tone: the tone of the headline figure alone.
    """

    tone: Tone = "neutral"
    number: str = ""
    caption: str = ""
    sentence: str = ""
    facts: tuple[Fact, ...] = ()
    number_tone: Tone = "neutral"


def interval(metrics: Metrics, name: str) -> str:
    """Return the interval of a share in brackets, "" where none was measured."""
    known = ends(metrics, name)
    return f" (95 % interval {known})" if known else ""


def figure(metrics: Metrics, name: str) -> float | None:
    """Return a figure, None where it was not measured or is not finite."""
    value = metrics.get(name)
    return None if value is None or not math.isfinite(value) else float(value)


def by_interval(
    metrics: Metrics,
    name: str,
    rival: float,
    caption: str,
    sentences: tuple[str, str, str],
    facts: list[Fact],
    best: Tone = "good",
) -> Verdict:
    """Return the verdict by a share whose interval lies above, around or below that of a rival.

    Args:
        metrics: final metrics of the run.
        name: metric that is the share.
        rival: the share to beat.
        caption: name of the figure on the page.
        sentences: for above, below and undecided; without an interval the share itself decides.
        facts: the other figures, in order.
        best: the tone of a share above.
    """
    rate = figure(metrics, name) or 0.0
    low, high = figure(metrics, f"{name}_low"), figure(metrics, f"{name}_high")
    above, below, undecided = sentences
    tone: Tone
    if (rate if low is None else low) > rival:
        tone, sentence = best, above
    elif (rate if high is None else high) < rival:
        tone, sentence = "bad", below
    else:
        tone, sentence = "undecided", undecided
    found = Verdict(tone, percent(rate), caption + interval(metrics, name), sentence, tuple(facts))
    return unless_few(found, metrics, name)


def unless_few(found: Verdict, metrics: Metrics, name: str) -> Verdict:
    """Return the verdict, without its headline where that is of fewer than 30 prompts or pairs.

    Args:
        found: verdict by a figure.
        metrics: final metrics of the run.
        name: metric that is the figure.
    """
    key = name.replace("win_rate" if "win_rate" in name else "accuracy", "num_pairs")
    of_pairs = key != name and key in metrics
    noun = "pair" if of_pairs else "prompt"
    count = figure(metrics, key if of_pairs else "val/num_prompts")
    if count is None or count >= FEW:
        return found
    caption, _, known = found.caption.partition(" (")
    fact = Fact(caption.removeprefix("of "), found.number, known.rstrip(")"))
    few = f"{counted(count, noun)} {'is' if count == 1 else 'are'} too few"
    sentence = f"No headline: {few} to say more than the figures below; {FEW} are needed."
    return Verdict(sentence=sentence, facts=(fact, *found.facts))
