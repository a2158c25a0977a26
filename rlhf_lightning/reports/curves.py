"""The curves of a report: their order, and the references drawn beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rlhf_lightning.reports.charts import Figure, Series, line_chart
from rlhf_lightning.runs.folder import ITERATION
from rlhf_lightning.runs.metric_catalog import (
    QUANTITIES,
    bound_keys,
    capitalized,
    quantity,
    show,
    step_quantity,
)

Rows = Sequence[Mapping[str, float]]

FIRST = (  # `*` is the name of the objective, whichever it is
    *("rollout/score", "rollout/teacher_kl_per_token", "rollout/kl_per_token"),
    *("rollout/response_length", "*/clipfrac", "*/explained_variance", "*/entropy"),
    *("*/approx_kl", "rollout/informative_groups", "rollout/eos_fraction", "rollout/distinct_2"),
    *("*/accuracy", "*/loss", "*/chosen_reward", "*/rejected_reward", "*/margin"),
    *("val/loss", "val/accuracy", "val/calibration_error", "val/margin"),
)
_REFERENCES = {
    "val/accuracy": (
        ("val/label_ceiling", "ceiling of the labels"),
        ("val/longer_wins_accuracy", "the longer one wins"),
        ("val/majority_accuracy", "the more frequent label"),
    )
}
_ELSEWHERE = ("time/", "throughput/")


def looked_at_first(names: Iterable[str]) -> list[str]:
    """Return those of the metrics that one looks at first, in that order."""
    places = {name: place for place, name in enumerate(FIRST)}
    ranks = {name: places.get(name, places.get(f"*/{step_quantity(name)}")) for name in names}
    return sorted((n for n, rank in ranks.items() if rank is not None), key=lambda n: ranks[n] or 0)


def curves(rows: Rows) -> tuple[list[Figure], list[Figure]]:
    """Return a small chart a metric: those that one looks at first, and the others."""
    names = list(dict.fromkeys(name for row in rows for name in row if name != ITERATION))
    inside = {held for name in names if (held := _held_out(name)) in names}
    inside |= {n for name in names for n, _ in _REFERENCES.get(name, ())}
    # An interval without its value says nothing.
    inside |= {bound for name in names for bound in bound_keys(name)}
    shown = [n for n in names if n not in inside and not n.startswith(_ELSEWHERE)]
    first = looked_at_first(shown)
    places = {name: place for place, name in enumerate(QUANTITIES)}
    rest = sorted(set(shown) - {*first}, key=lambda name: (places.get(name, len(places)), name))
    if not first:
        first, rest = rest, []
    figures, more = ([f for n in part if (f := _figure(n, rows, names))] for part in (first, rest))
    return figures, more


def _held_out(name: str) -> str:
    """Return the held-out metric that is drawn into the chart of one of the training, or ""."""
    phase, _, of = name.partition("/")
    return "" if phase == "val" else f"val/{of}"


def _figure(name: str, rows: Rows, names: Sequence[str]) -> Figure | None:
    about = quantity(name)
    together = _held_out(name) in names
    lines = {"training": name, "held-out": _held_out(name)} if together else {name: name}
    series = [_series(metric, rows, label) for label, metric in lines.items()]
    references = []
    for key, label in (pair for n in lines.values() for pair in _REFERENCES.get(n, ())):
        values = [row[key] for row in rows if key in row]
        if values and values[-1] == values[-1]:
            references.append((label, values[-1]))
    chart = line_chart(
        about.label, series, unit=about.unit, band=about.healthy, references=references
    )
    if not chart:
        return None
    finite = [value for _, value in series[-1].points if math.isfinite(value)]
    ends = (finite[0], finite[-1]) if finite else ()
    like = max(map(abs, ends), default=None)
    return Figure(
        capitalized(about.label.removeprefix("training ") if together else about.label),
        chart,
        now=show(name, finite[-1], like=like) if finite else "",
        start=show(name, finite[0], like=like) if len(finite) > 1 else "",
        code="" if together else name,
        legends=list(lines) if together else (),
        note=f"usual {about.usual}" if about.usual else "",
    )


def _series(name: str, rows: Rows, label: str) -> Series:
    points = [(row[ITERATION], row[name]) for row in rows if name in row]
    sparse = name.startswith("val/") or len(points) * 2 <= len(rows)
    return Series(label, points, "marks" if sparse else "line")
