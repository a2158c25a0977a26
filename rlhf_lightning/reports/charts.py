"""The templates of a page, and charts as inline SVG: no script, no font, no network.

Every value that is not HTML already is escaped; colours come from the page's CSS.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

from jinja2 import PackageLoader
from markupsafe import Markup

from rlhf_lightning.runs import metric_catalog as catalog
from rlhf_lightning.runs.folder import ITERATION, from_here
from rlhf_lightning.runs.jinja import environment
from rlhf_lightning.runs.metric_catalog import bound_keys, capitalized, number, quantity, show
from rlhf_lightning.runs.summary import Metrics, figure

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def render(template: str, **context: Any) -> Markup:
    """Return a template of `templates/` as HTML."""
    return Markup(_TEMPLATES.get_template(template).render(context))


def _printable(value: object) -> str:
    if isinstance(value, Markup):
        return value
    shown = str(value).encode("utf-8", "replace").decode("utf-8")
    return _CONTROL.sub(lambda one: chr(0x2400 + ord(one[0])) if one[0] < " " else "\ufffd", shown)


_OWN = PackageLoader("rlhf_lightning.reports")
_TEMPLATES = environment(_OWN, autoescape=True, finalize=_printable)
_FILTERS = (catalog.counted, catalog.duration, from_here, number, catalog.percent)
_TEMPLATES.filters |= {each.__name__: each for each in _FILTERS}
WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 38
NUM_COLOURS = 6
_MAX_POINTS = 240
_SMOOTH_FROM = 60
LEAST_SPAN = 0.05  # of an axis, by the largest value on it

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Args:
        label: its name, shown when a chart has several.
        points: (iteration, value), sorted; values that are not finite are gaps.
        bounds: low and high of each point: of `marks` a line through it where both are finite, of a
            line a band around it.
        names: of the points, written above their bounds.
        kind: `line` for a measurement every iteration, `marks` for one now and then, `dots` for
            points that no line joins.
    """

    label: str
    points: Sequence[Point]
    kind: str = "line"
    bounds: Sequence[Point] = ()
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Figure:
    """A chart with its caption.

    Args:
        title: what it shows.
        chart: the `<svg>`.
        now: the last value, as text.
        start: the first one.
        code: the name of its metric.
        legends: of the lines, in the order of their colours.
        note: what else is to know, such as where a healthy run keeps it.
        of: whose values these two are, where it has several lines.
    """

    title: str
    chart: str
    now: str = ""
    code: str = ""
    legends: Sequence[str] = ()
    note: str = ""
    start: str = ""
    of: str = ""


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "",
    band: Sequence[float] | None = None,
    references: Sequence[tuple[str, float]] = (),
    axis: str = ITERATION,
) -> str:
    """Return an `<svg>` with axes, ticks, the band shaded, and the curves.

    A curve of many points is drawn faint, with its running mean over it. Text is escaped.

    Args:
        title: read out by screen readers.
        series: at least one with a finite point, else the result is "".
        unit: "share" labels the axis in percent.
        band: the healthy range, shaded where it lies within the axis.
        references: label and value of horizontal lines to hold the curves against.
        axis: what the horizontal axis shows; iterations are counted, all else is measured.
    """
    finite = [p for s in series for p in s.points if math.isfinite(p[1])]
    if not finite:
        return ""
    ends = [end for one in series for ends in one.bounds for end in ends if math.isfinite(end)]
    ends += [value for _, value in references]
    low, high = _value_range([p[1] for p in finite] + ends, band, unit)
    ticks = nice_ticks(low, high, 4)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    frame = _Frame(min(p[0] for p in finite), max(p[0] for p in finite), low, high)
    shaded = [(max(band[0], low), min(band[1], high))] if band else []
    bands = [edges for edges in shaded if edges[1] > edges[0]]
    named = (zip(s.points, s.bounds, s.names, strict=False) for s in series)
    names = [(x, high, name) for each in named for (x, _), (_, high), name in each]
    shapes = [shape for index, one in enumerate(series) for shape in _shapes(one, index)]
    columns = frame.columns(axis == ITERATION)
    axes = {"frame": frame, "axis": axis, "rows": _labelled(ticks, unit), "columns": columns}
    marks = {"bands": bands, "shapes": shapes, "names": names, "references": references}
    return render("chart.svg", title=title, **axes, **marks)


def histogram(title: str, parts: Mapping[str, Sequence[float]], of: str) -> Markup | str:
    """Return an `<svg>` of how often values occur, the parts over each other in the same bins.

    There are about 20 bins of a round width, with an edge at 0.

    Args:
        title: of the horizontal axis.
        parts: label -> finite values; without any the result is "".
        of: what is counted.
    """
    values = [value for part in parts.values() for value in part]
    if not values:
        return ""
    # Whole numbers stand in the middle of their bins.
    shift = 0.5 if all(value == int(value) for value in values) else 0.0
    spread = max(values) - min(values) or abs(values[0]) * 0.1 or 1.0
    step = max(nice_ticks(0, spread, 20)[1], 2 * shift)
    counted = [
        Counter(math.floor((value + shift) / step + 1e-9) for value in part)
        for part in parts.values()
    ]
    places = [place for counts in counted for place in counts]
    low, high = min(places), max(places) + 1
    most = max(count for counts in counted for count in counts.values())
    ticks = [tick for tick in nice_ticks(0, most, 4) if tick == int(tick)]
    frame = _Frame(low * step - shift, high * step - shift, 0, most * 1.04)
    areas = []
    for counts in counted:
        tops = [(edge, counts[place]) for place in range(low, high) for edge in (place, place + 1)]
        areas.append([(edge * step - shift, count) for edge, count in [(low, 0), *tops, (high, 0)]])
    axes = {"frame": frame, "rows": _labelled(ticks), "columns": frame.columns(shift > 0)}
    axis = f"{title}; upwards: number of {of}"
    return render("chart.svg", title=title, axis=axis, areas=areas, **axes)


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers that span `low` to `high` from the inside."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # A set: twelve digits may not tell neighbours apart where the spread is tiny.
    return sorted({float(f"{i * step:.12g}") for i in range(first, last + 1)}) or [low]


@dataclass(frozen=True)
class _Frame:
    """Data coordinates to pixels."""

    first: float
    last: float
    low: float
    high: float
    width, height, left, right = WIDTH, HEIGHT, LEFT, WIDTH - RIGHT

    def x(self, value: float) -> float:
        span = self.last - self.first
        share = (value - self.first) / span if span else 0.5
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def anchor(self, value: float) -> str:
        """Return where a name of a point begins, so that it stays inside of the axes."""
        if self.x(value) > self.right - 16:
            return "end"
        return "start" if self.x(value) < self.left + 16 else "middle"

    def columns(self, whole: bool) -> list[tuple[float, str]]:
        """Return the ticks of the horizontal axis, whole numbers where it counts, with labels."""
        ticks = nice_ticks(self.first, self.last, 4)
        return _labelled([x for x in ticks if x == int(x)] or [self.first] if whole else ticks)


# A line, or with a radius dots, in data coordinates: class, points, style, radius.
_Shape = tuple[str, Sequence[Point], str, int]


def _value_range(
    values: Sequence[float], band: Sequence[float] | None, unit: str
) -> tuple[float, float]:
    low, high = min(values), max(values)
    floor = 0.0 if low >= 0 else -math.inf
    ceiling = 1.0 if unit == "share" and high <= 1 else math.inf
    size = max(abs(low), abs(high))
    span = high - low or size * 0.2 or 1.0
    # A curve that moves by less than the page shows of its value is drawn flat.
    if (lacking := size * LEAST_SPAN - (high - low)) > 0:
        low, high = low - lacking / 2, high + lacking / 2
    # The edge of the band belongs on the axis when it is near, so that one sees the distance.
    for edge in band or ():
        if low - span <= edge <= high + span:
            low, high = min(low, edge), max(high, edge)
    padding = (high - low or span) * 0.06
    return max(low - padding, floor), min(high + padding, ceiling)


def _labelled(ticks: Sequence[float], unit: str = "") -> list[tuple[float, str]]:
    share = unit == "share"
    return [(tick, f"{100 * tick:g} %" if share else f"{tick:,.6g}") for tick in ticks]


def _shapes(series: Series, index: int) -> list[_Shape]:
    """Return the lines and dots of a curve; from the seventh on, where colours repeat, they differ.

    Lines are dashed there, and dots hollow.
    """
    colour, again = f"s{index % NUM_COLOURS}", index >= NUM_COLOURS
    dashed = "stroke-dasharray:6 3" * again
    hollow = f"fill:var(--card);stroke:var(--{colour})" * again
    by_finite = groupby(series.points, key=lambda point: math.isfinite(point[1]))
    runs = [list(run) for finite, run in by_finite if finite]
    points = [point for run in runs for point in run]
    if series.kind == "dots":
        return [(f"{colour} dot", thin(points, _MAX_POINTS), "", 2)]
    shapes: list[_Shape] = []
    if series.kind == "marks":
        shapes += [(f"line {colour}", points, dashed, 0)] * (len(points) != 1)
        shapes += [(colour, points, hollow, 3)] * (len(points) <= 40)
        bounds = zip(series.points, series.bounds, strict=False)
        bars = [[(x, end) for end in ends if math.isfinite(end)] for (x, _), ends in bounds]
        return shapes + [(f"faint {colour}", bar, "", 0) for bar in bars if len(bar) == 2]
    if series.bounds:
        ends = list(zip(series.points, series.bounds, strict=True))
        low, high = (_smooth([(x, of[side]) for (x, _), of in ends]) for side in (0, 1))
        shapes.append((f"range {colour}", [*low, *reversed(high)], "", 0))
    for run in runs:
        shapes += [(f"faint {colour}", thin(run, _MAX_POINTS), "", 0)] * (len(run) >= _SMOOTH_FROM)
        one = (colour, run, hollow, 3)
        shapes.append(one if len(run) == 1 else (f"line {colour}", _smooth(run), dashed, 0))
    return shapes


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """Return at most about `limit` points that keep the extremes of every stretch."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        lowest, highest = (f(stretch, key=lambda p: p[1]) for f in (min, max))
        kept += sorted({lowest, highest})
    return kept


def _smooth(points: Sequence[Point]) -> list[Point]:
    """Return the curve, or the running mean of a long one, of points that can be drawn."""
    if len(points) < _SMOOTH_FROM:
        return list(points)
    window = max(5, len(points) // 20) // 2
    totals = list(accumulate((value for _, value in points), initial=0.0))
    edges = [(max(0, i - window), min(len(points), i + window + 1)) for i in range(len(points))]
    means = [(totals[end] - totals[first]) / (end - first) for first, end in edges]
    return thin([(x, mean) for (x, _), mean in zip(points, means, strict=True)], _MAX_POINTS)


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
    ranks = {n: places.get(n, places.get(f"*/{catalog.step_quantity(n)}")) for n in names}
    return sorted((n for n, rank in ranks.items() if rank is not None), key=lambda n: ranks[n] or 0)


def curves(rows: Rows, metrics: Metrics) -> tuple[list[Figure], list[Figure]]:
    """Return a small chart a metric: those that one looks at first, and the others.

    Held-out figures begin with that of the baseline and end with the final one, where it is known.
    """
    names = list(dict.fromkeys(name for row in rows for name in row if name != ITERATION))
    inside = {held for name in names if (held := _held_out(name)) in names}
    inside |= {n for name in names for n, _ in _REFERENCES.get(name, ())}
    # An interval without its value says nothing.
    inside |= {bound for name in names for bound in bound_keys(name)}
    shown = [n for n in names if n not in inside and not n.startswith(_ELSEWHERE)]
    first = looked_at_first(shown)
    places = {name: place for place, name in enumerate(catalog.QUANTITIES)}
    rest = sorted(set(shown) - {*first}, key=lambda name: (places.get(name, len(places)), name))
    if not first:
        first, rest = rest, []
    figures, more = (
        [f for n in part if (f := _figure(n, rows, names, metrics))] for part in (first, rest)
    )
    return figures, more


def _held_out(name: str) -> str:
    """Return the held-out metric that is drawn into the chart of one of the training, or ""."""
    phase, _, of = name.partition("/")
    return "" if phase == "val" else f"val/{of}"


def _figure(name: str, rows: Rows, names: Sequence[str], metrics: Metrics) -> Figure | None:
    about, held = quantity(name), _held_out(name)
    together = held in names
    lines = {"training": name, "held-out": held} if together else {name: name}
    series = [_series(metric, rows, label) for label, metric in lines.items()]
    before = figure(metrics, held.replace("/", "/baseline_")) if together else None
    if before is not None:
        series[-1] = replace(series[-1], points=[(0, before), *series[-1].points])
    references = []
    for key, label in (pair for n in lines.values() for pair in _REFERENCES.get(n, ())):
        values = [row[key] for row in rows if key in row]
        if values and values[-1] == values[-1]:
            references.append((label, values[-1]))
    look: dict[str, Any] = {"unit": about.unit, "band": about.healthy, "references": references}
    chart = line_chart(about.label, series, **look)
    if not chart:
        return None
    finite = [value for _, value in series[-1].points if math.isfinite(value)]
    if together and finite and (after := figure(metrics, held)) is not None:
        finite.append(after)
    has_start = before is not None or not together  # else the first is of a later iteration
    ends = (finite[0], finite[-1]) if finite else ()
    like = max(map(abs, ends), default=None)
    return Figure(
        capitalized(about.label.removeprefix("training ") if together else about.label),
        chart,
        of="held-out " * together,
        now=show(name, finite[-1], like=like) if finite else "",
        start=show(name, finite[0], like=like) if len(finite) > 1 and has_start else "",
        code="" if together else name,
        legends=list(lines) if together else (),
        note=f"usual {about.usual}" if about.usual else "",
    )


def points_of(name: str, rows: Rows) -> list[Point]:
    """Return a metric over iterations; no accuracy of 0 where all margins are 0, as before DPO."""
    margin = name.removesuffix("accuracy") + "margin" if name.endswith("/accuracy") else ""
    measured = (row for row in rows if name in row)
    return [
        (row[ITERATION], row[name]) for row in measured if not row[name] == row.get(margin) == 0
    ]


def _series(name: str, rows: Rows, label: str) -> Series:
    points = points_of(name, rows)
    sparse = name.startswith("val/") or len(points) * 2 <= len(rows)
    return Series(label, points, "marks" if sparse else "line")
