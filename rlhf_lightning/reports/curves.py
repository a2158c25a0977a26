"""Which curves a report shows, in which order, and what they are held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf_lightning.reports.charts import Reference, Series, latest, line_chart
from rlhf_lightning.reports.html import text
from rlhf_lightning.runs.folder import ITERATION
from rlhf_lightning.runs.metric_catalog import QUANTITIES, bound_keys, number, percent, quantity

Rows = Sequence[Mapping[str, float]]

FIRST = (
    "rollout/score",
    "rollout/kl_per_token",
    "rollout/response_length",
    "ppo/clipfrac",
    "ppo/explained_variance",
    "ppo/entropy",
    "ppo/approx_kl",
    "rollout/eos_fraction",
    "rollout/distinct_2",
    "sft/loss",
    "reward/loss",
    "reward/accuracy",
    "val/loss",
    "val/accuracy",
    "val/calibration_error",
    "val/margin",
)
# The held-out curve is drawn into the chart of the training curve.
_TOGETHER = {
    "sft/loss": "val/loss",
    "reward/loss": "val/loss",
    "reward/accuracy": "val/accuracy",
    "reward/margin": "val/margin",
    "rollout/score": "val/score",
}
_REFERENCES = {
    "val/accuracy": (
        ("val/label_ceiling", "ceiling of the labels"),
        ("val/longer_wins_accuracy", "the longer one wins"),
    )
}
_ELSEWHERE = ("time/", "throughput/")


def curves_section(rows: Rows) -> str:
    """Return the section with a small chart a metric, "" if nothing was recorded."""
    names = _names(rows)
    inside = {held for name, held in _TOGETHER.items() if name in names and held in names}
    inside |= {n for name in names for n, _ in _REFERENCES.get(name, ())}
    # An interval without its value says nothing.
    inside |= {bound for name in names for bound in bound_keys(name)}
    shown = [n for n in names if n not in inside and not n.startswith(_ELSEWHERE)]
    first = [n for n in FIRST if n in shown]
    rest = sorted((n for n in shown if n not in first), key=_order)
    if not first:
        first, rest = rest, []
    figures = [_figure(name, rows, names) for name in first]
    if not any(figures):
        return ""
    hidden = "".join(_figure(name, rows, names) for name in rest)
    if hidden:
        hidden = (
            f'<details><summary>{len(rest)} more curves</summary><div class="charts">{hidden}</div>'
            "</details>"
        )
    last = int(rows[-1][ITERATION])
    return (
        "<section><h2>Curves</h2>"
        f'<p class="lead">Over {last} iterations, the horizontal axis. Shaded green: where '
        "the value usually lies in a run that goes well. Bold over faint: the running mean.</p>"
        f'<div class="charts">{"".join(figures)}</div>{hidden}</section>'
    )


def _names(rows: Rows) -> list[str]:
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    names.pop(ITERATION, None)
    return list(names)


def _order(name: str) -> tuple[int, str]:
    known = list(QUANTITIES)
    return (known.index(name) if name in QUANTITIES else len(known), name)


def _figure(name: str, rows: Rows, names: Sequence[str]) -> str:
    about = quantity(name)
    held_out = _TOGETHER.get(name)
    series = [_series(name, rows, "training" if held_out in names else "")]
    if held_out is not None and held_out in names:
        series.append(_series(held_out, rows, "held-out"))
    shown = [name, *([held_out] if held_out in names and held_out else [])]
    references = []
    for key, label in (pair for n in shown for pair in _REFERENCES.get(n, ())):
        values = [row[key] for row in rows if key in row]
        if values and values[-1] == values[-1]:
            references.append(Reference(label, values[-1]))
    chart = line_chart(
        about.label, series, unit=about.unit, band=about.healthy, references=references
    )
    if not chart:
        return ""
    unit = "" if about.unit == "share" else f" {about.unit}"
    label = about.label.removeprefix("training ") if len(series) > 1 else about.label
    now = latest(series[-1], about.unit)
    return (
        f"<figure><figcaption><b>{text(_capital(label))}</b>"
        f'<span class="now">{text(now + unit)}</span>'
        f'<span class="key">{_key(name, series, about.healthy, about.unit)}</span></figcaption>'
        f"{chart}</figure>"
    )


def _key(
    name: str, series: Sequence[Series], healthy: tuple[float, float] | None, unit: str
) -> str:
    parts = []
    if len(series) > 1:
        parts += [
            f'<span class="legend"><span class="s{i}t">●</span> {text(s.label)}</span>'
            for i, s in enumerate(series)
        ]
    else:
        parts.append(f'<code class="legend">{text(name)}</code>')
    if healthy is not None:
        low, high = (
            percent(v).replace(".0 ", " ") if unit == "share" else number(v) for v in healthy
        )
        low, high = (_trim(v) for v in (low, high))
        parts.append(f'<span class="legend">usual {text(low)} to {text(high)}</span>')
    return "".join(parts)


def _trim(value: str) -> str:
    head, dot, tail = value.partition(".")
    return value if not dot or not tail.isdigit() else f"{head}.{tail}".rstrip("0").rstrip(".")


def _series(name: str, rows: Rows, label: str) -> Series:
    points = [(row[ITERATION], row[name]) for row in rows if name in row]
    sparse = name.startswith("val/") or len(points) * 2 <= len(rows)
    return Series(label or name, points, "marks" if sparse else "line")


def _capital(label: str) -> str:
    return label[:1].upper() + label[1:]
