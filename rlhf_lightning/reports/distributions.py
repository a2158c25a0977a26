"""The distributions behind the means of a run: wins and losses, responses, pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rlhf_lightning.reports.charts import Figure, histogram
from rlhf_lightning.reports.html import render
from rlhf_lightning.runs.folder import ITERATION
from rlhf_lightning.runs.metric_catalog import counted, number, percent
from rlhf_lightning.runs.outcome import interval
from rlhf_lightning.runs.verdict import JUDGES

Lines = Sequence[Mapping[str, Any]]


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
    """Return histograms of score and length, and in words what they are of.

    Held-out responses of both sides, or else those of the first and the last rollout.
    """
    held_out = [line for line in lines if line.get("held_out") == "answers"][-1:]
    rollouts = [line for line in lines if "held_out" not in line]
    ends = (*rollouts[:1], *rollouts[-1:])
    sides: dict[str, Mapping[str, Any]] = {f"iteration {line[ITERATION]}": line for line in ends}
    for line in held_out:
        labels = ("before", "after") if line[ITERATION] else ("baseline", "policy")
        theirs = {name: line.get(f"baseline_{name}") for name in ("score", "length")}
        sides = dict(zip(labels, (theirs, line), strict=True))
    figures = []
    for name, title in (("score", "Score of a response"), ("length", "Tokens a response")):
        values = {label: _numbers(side.get(name)) for label, side in sides.items()}
        if parts := {label: part for label, part in values.items() if part}:
            means = [fmean(part) for part in parts.values()]
            shown = [number(mean, like=max(map(abs, means))) for mean in means]
            legends = [f"{label}, mean {mean}" for label, mean in zip(parts, shown, strict=True)]
            figures.append(Figure(title, histogram(title, parts), legends=legends))
    count = max((len(_numbers(side.get("length"))) for side in sides.values()), default=0)
    where = "a side" if held_out else "of a rollout"
    what = "held-out response" if held_out else "response"
    return figures, f"{counted(count, what)} {where}." * (count > 0)


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
