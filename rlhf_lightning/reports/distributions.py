"""The distributions behind the means of a run: wins and losses, responses, pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

from rlhf_lightning.reports.charts import Figure, histogram
from rlhf_lightning.reports.html import render
from rlhf_lightning.runs.folder import ITERATION
from rlhf_lightning.runs.metric_catalog import counted, number, percent
from rlhf_lightning.runs.outcome import interval
from rlhf_lightning.runs.verdict import JUDGES

Lines = Sequence[Mapping[str, Any]]
_MOST_BINS = 10  # of shares


def wins_figures(metrics: Mapping[str, float | None]) -> list[Figure]:
    """Return wins, ties and losses of the policy as one bar, for each judge that was asked."""
    figures = []
    for judge, label in JUDGES.items():
        name = f"val/{judge}_win_rate"
        rate, ties = metrics.get(name), metrics.get(f"val/{judge}_tie_rate")
        if rate is None or ties is None:
            continue
        won = rate - ties / 2
        shares = {"won": won, "tied": ties, "lost": max(1 - won - ties, 0.0)}
        parts = [(word, word, share, percent(share)) for word, share in shares.items()]
        note = f"A tie counts one half; {interval(metrics, name).strip(' ()')}"
        note = note.removesuffix("; ") + "."
        chart = render("wins.html", parts=parts, note=note)
        figures.append(Figure(f"Comparisons, by {label}", chart, now=percent(rate)))
    return figures


def answers_figures(lines: Lines) -> tuple[list[Figure], str]:
    """Return histograms of score, length and the share solved, and in words what they are of.

    Held-out responses of both sides, or else those of the first and the last rollout.
    """
    held_out = [line for line in lines if line.get("held_out") == "answers"][-1:]
    rollouts = [line for line in lines if "held_out" not in line]
    ends = {f"iteration {line[ITERATION]}": line for line in (*rollouts[:1], *rollouts[-1:])}
    sides = ends
    for line in held_out:
        labels = ("before", "after") if line[ITERATION] else ("baseline", "policy")
        theirs = {name: line.get(f"baseline_{name}") for name in ("score", "length")}
        sides = dict(zip(labels, (theirs, line), strict=True))
    figures = []
    for name, title in (("score", "Score of a response"), ("length", "Tokens a response")):
        figures += _compared(title, {k: _numbers(side.get(name)) for k, side in sides.items()})
    pools = [line for line in lines if line.get("held_out") == "pool"]
    grouped = {"policy": pools[-1]} if pools else ends
    whose, before = next(iter((sides if pools else ends).items()), ("", {}))
    groups = {label: _groups(line) for label, line in grouped.items()}
    figures += _solved(groups, _numbers(before.get("score")), whose)
    count = max((len(_numbers(side.get("length"))) for side in sides.values()), default=0)
    where = "a side" if held_out else "of a rollout"
    what = "held-out response" if held_out else "response"
    return figures, f"{counted(count, what)} {where}." * (count > 0)


def _compared(
    title: str, parts: Mapping[str, list[float]], *, bins: int | None = None, note: str = ""
) -> list[Figure]:
    """Return a histogram with the means of its parts, none without values."""
    parts = {label: values for label, values in parts.items() if values}
    if not parts:
        return []
    means = [fmean(values) for values in parts.values()]
    like = max(map(abs, means))
    shown = [percent(mean) if bins else number(mean, like=like) for mean in means]
    legends = [f"{label}, mean {mean}" for label, mean in zip(parts, shown, strict=True)]
    return [Figure(title, histogram(title, parts, bins=bins), legends=legends, note=note)]


def _solved(
    groups: Mapping[str, list[list[float]]], before: Sequence[float], whose: str
) -> list[Figure]:
    """Return how much of each prompt's group of scores is solved.

    A response is solved that has the higher of two scores; where there are more scores, one above
    the mean of `before`, which is called `whose`.
    """
    scores = {score for part in groups.values() for group in part for score in group}
    if len(scores) < 2 or not before:
        return []
    least, said = max(scores), f"a score of {number(max(scores))}"
    if len(scores) > 2:
        least = math.nextafter(fmean(before), math.inf)
        said = f"a score above {number(least)}, the mean of {whose}"
    shares = {
        label: [fmean(score >= least for score in group) for group in part if group]
        for label, part in groups.items()
    }
    bins = min(max(len(group) for part in groups.values() for group in part), _MOST_BINS - 1) + 1
    return _compared("Share solved of each prompt", shares, bins=bins, note=f"solved: {said}")


def _groups(line: Mapping[str, Any]) -> list[list[float]]:
    scores, sizes = line.get("score"), _numbers(line.get("groups"))
    edges = accumulate(map(int, sizes), initial=0)
    return [_numbers(_listed(scores)[start:end]) for start, end in pairwise(edges)]


def pairs_section(lines: Lines) -> str:
    """Return a reward model's margins, how far its probabilities hold, and its surest mistakes."""
    pairs = [line for line in lines if line.get("held_out") == "pairs"]
    margins = _numbers(pairs[-1].get("margin")) if pairs else []
    if not margins:
        return ""
    parts = {
        "ranked right": [margin for margin in margins if margin > 0],
        "ranked wrong": [margin for margin in margins if margin <= 0],
    }
    mean = f"mean {number(fmean(margins))}"
    figure = Figure("Margin", histogram("margin", parts), now=mean, legends=list(parts))
    rows = [row for row in map(_numbers, _listed(pairs[-1].get("reliability"))) if len(row) == 5]
    wrong = [row for row in _listed(pairs[-1].get("wrong")) if isinstance(row, dict)]
    return render("pairs.html", figure=figure, rows=rows, wrong=wrong, count=len(margins))


def _numbers(values: object) -> list[float]:
    """Return the finite numbers of a list; what else a file may hold is left out."""
    kinds = [v for v in _listed(values) if isinstance(v, int | float) and not isinstance(v, bool)]
    return [float(v) for v in kinds if abs(v) < 1e15]


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
