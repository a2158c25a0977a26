"""Charts as inline SVG: no script, no font, no network; colours come from the page's CSS."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rlhf_lightning.reports.html import text
from rlhf_lightning.runs.metric_catalog import number

WIDTH, HEIGHT = 360, 196
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24
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
        bounds: low and high of each point, drawn as a line through it where both are finite.
        names: of the points, written above their bounds.
        kind: `line` for a measurement every iteration, `marks` for one now and then, `dots` for
            points that no line joins, `reference` for a dashed line without a colour.
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
    """

    title: str
    chart: str
    now: str = ""
    code: str = ""
    legends: Sequence[str] = ()
    note: str = ""
    start: str = ""


@dataclass(frozen=True)
class Reference:
    """A horizontal line to hold a curve against.

    Args:
        label: label of the line.
        value: its place on the axis.
    """

    label: str
    value: float


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "",
    band: tuple[float, float] | None = None,
    references: Sequence[Reference] = (),
    whole: bool = True,
) -> str:
    """Return an `<svg>` with axes, ticks, the band shaded, and the curves.

    A curve of many points is drawn faint, with its running mean over it. Text is escaped.

    Args:
        title: read out by screen readers.
        series: at least one with a finite point, else the result is "".
        unit: "share" labels the axis in percent.
        band: the healthy range, shaded where it lies within the axis.
        references: horizontal lines.
        whole: whether the horizontal axis counts, as iterations do, or measures.
    """
    finite = [p for s in series for p in s.points if math.isfinite(p[1])]
    if not finite:
        return ""
    ends = [end for one in series for ends in one.bounds for end in ends if math.isfinite(end)]
    ends += [r.value for r in references]
    low, high = _value_range([p[1] for p in finite] + ends, band, unit)
    ticks = nice_ticks(low, high, 4)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    frame = _Frame(min(p[0] for p in finite), max(p[0] for p in finite), low, high)
    parts = [_band(frame, band), _grid(frame, ticks, unit, over=None if whole else "")]
    parts += [_curve(frame, one, index) for index, one in enumerate(series)]
    parts += [_reference(frame, reference) for reference in references]
    return _svg(title, "".join(parts))


def histogram(
    title: str, parts: Mapping[str, Sequence[float]], *, bins: int | None = None
) -> Markup | str:
    """Return an `<svg>` of how often values occur, the parts over each other in the same bins.

    Args:
        title: read out by screen readers.
        parts: label -> finite values; without any the result is "".
        bins: of shares, over 0 to 1; None for about 20 of a round width, with an edge at 0.
    """
    values = [value for part in parts.values() for value in part]
    if not values:
        return ""
    # Whole numbers stand in the middle of their bins.
    shift = 0.5 if bins is None and all(value == int(value) for value in values) else 0.0
    step, low, high = 1 / (bins or 1), 0, bins or 0
    if not bins:
        spread = max(values) - min(values) or abs(values[0]) * 0.1 or 1.0
        step = max(nice_ticks(0, spread, 20)[1], 2 * shift)
        ends = (math.floor((end(values) + shift) / step + 1e-9) for end in (min, max))
        low, high = next(ends), next(ends) + 1
    counted = [
        Counter(min(math.floor((value + shift) / step + 1e-9), high - 1) for value in part)
        for part in parts.values()
    ]
    most = max(count for counts in counted for count in counts.values())
    ticks = [tick for tick in nice_ticks(0, most, 4) if tick == int(tick)]
    frame = _Frame(low * step - shift, high * step - shift, 0, most * 1.04)
    drawn = [_grid(frame, ticks, "", over="share" if bins else None if shift else "")]
    for index, counts in enumerate(counted):
        tops = [(edge, counts[place]) for place in range(low, high) for edge in (place, place + 1)]
        corners = " ".join(
            f"{frame.x(edge * step - shift)},{frame.y(count)}"
            for edge, count in [(low, 0), *tops, (high, 0)]
        )
        drawn.append(f'<polygon class="s{index % NUM_COLOURS}" points="{corners}"/>')
    return _svg(title, "".join(drawn))


def _svg(title: str, body: str) -> Markup:
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{text(title)}</title>{body}</svg>"
    )


def _dash(index: int) -> str:
    """Return the style of a line, which is dashed from the seventh on: colours repeat there."""
    return ' style="stroke-dasharray:6 3"' * (index >= NUM_COLOURS)


def _hollow(index: int) -> str:
    """Return the style of a dot, which is hollow where its line is dashed."""
    colour = f"var(--s{index % NUM_COLOURS})"
    return f' style="fill:var(--card);stroke:{colour}"' * (index >= NUM_COLOURS)


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

    def x(self, iteration: float) -> float:
        share = 0.5 if self.last == self.first else (iteration - self.first) / self.width
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    @property
    def width(self) -> float:
        return self.last - self.first


def _value_range(
    values: Sequence[float], band: tuple[float, float] | None, unit: str
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


def _band(frame: _Frame, band: tuple[float, float] | None) -> str:
    if band is None:
        return ""
    low, high = max(band[0], frame.low), min(band[1], frame.high)
    if high <= low:
        return ""
    top, bottom = frame.y(high), frame.y(low)
    return (
        f'<rect class="band" x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{round(bottom - top, 1)}"/>'
    )


def _grid(frame: _Frame, ticks: Sequence[float], unit: str, *, over: str | None) -> str:
    """Return lines and labels; `over` is the unit of the horizontal axis, None where it counts."""
    parts = []
    for tick in ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        label = text(_tick_label(tick, ticks, unit))
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 3.5}">{label}</text>')
    x_ticks = nice_ticks(frame.first, frame.last, 4)
    if over is None:
        x_ticks = [t for t in x_ticks if t == int(t)] or [frame.first]
    for tick in x_ticks:
        x = frame.x(tick)
        anchor = "end" if x > WIDTH - RIGHT - 12 else "middle"
        parts.append(
            f'<text class="tick" style="text-anchor:{anchor}" x="{x}" y="{HEIGHT - 7}">'
            f"{_number_of(tick) if over is None else _tick_label(tick, x_ticks, over)}</text>"
        )
    return "".join(parts)


def _number_of(iteration: float) -> str:
    """Return an iteration with a thin space between thousands."""
    return f"{int(iteration):,}".replace(",", "\u202f")


def _tick_label(tick: float, ticks: Sequence[float], unit: str) -> str:
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(tick) or 1.0
    if unit == "share":
        return f"{100 * tick:.{_digits(100 * step)}f} %"
    size = max(abs(t) for t in ticks)
    if size and (size >= 1e5 or size < 1e-3):
        return number(tick, like=size)
    return f"{tick:.{_digits(step)}f}"


def _digits(step: float) -> int:
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return digits if math.isclose(step * 10**digits, round(step * 10**digits)) else digits + 1


def _reference(frame: _Frame, reference: Reference) -> str:
    y = frame.y(reference.value)
    return (
        f'<line class="reference" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
        f'<text class="note" x="{WIDTH - RIGHT}" y="{y - 4}">{text(reference.label)}</text>'
    )


def _curve(frame: _Frame, series: Series, index: int) -> str:
    colour = f"s{index % NUM_COLOURS}"
    runs = _runs(series.points)
    if series.kind == "reference":
        return f'<polyline class="reference" points="{_steps(frame, series.points)}"/>'
    if series.kind == "dots":
        return "".join(
            f'<circle class="{colour} dot" cx="{frame.x(x)}" cy="{frame.y(y)}" r="2"/>'
            for x, y in thin([p for run in runs for p in run], _MAX_POINTS)
        )
    if series.kind == "marks":
        marks = [p for run in runs for p in run]
        dots = "".join(_mark(frame, p, index) for p in marks if 1 < len(marks) <= 40)
        return _path(frame, marks, "line", index) + dots + _bounds(frame, series, colour)
    parts = []
    for run in runs:
        many = len(run) >= _SMOOTH_FROM
        parts.append(_path(frame, thin(run, _MAX_POINTS), "faint" if many else "line", index))
        if many:
            parts.append(_path(frame, thin(_running_mean(run), _MAX_POINTS), "line", index))
    return "".join(parts)


def _bounds(frame: _Frame, series: Series, colour: str) -> str:
    parts = []
    for (x, _), (low, high) in zip(series.points, series.bounds, strict=False):
        if math.isfinite(low) and math.isfinite(high):
            ends = _steps(frame, [(x, low), (x, high)])
            parts.append(f'<polyline class="faint {colour}" points="{ends}"/>')
    for (x, _), (_, high), name in zip(series.points, series.bounds, series.names, strict=False):
        parts.append(
            f'<text class="dot-name" style="text-anchor:middle" x="{frame.x(x)}" '
            f'y="{frame.y(high) - 6:.1f}">{text(name)}</text>'
        )
    return "".join(parts)


def _steps(frame: _Frame, points: Sequence[Point]) -> str:
    return " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in points)


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


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


def _running_mean(points: Sequence[Point]) -> list[Point]:
    window = max(5, len(points) // 20) // 2
    totals = [0.0]
    for _, value in points:
        totals.append(totals[-1] + value)
    smooth = []
    for i, (x, _) in enumerate(points):
        first, end = max(0, i - window), min(len(points), i + window + 1)
        smooth.append((x, (totals[end] - totals[first]) / (end - first)))
    return smooth


def _path(frame: _Frame, points: Sequence[Point], kind: str, index: int) -> str:
    if len(points) == 1:
        return _mark(frame, points[0], index)
    style = _dash(index) if kind == "line" else ""
    colour = f"s{index % NUM_COLOURS}"
    return f'<polyline class="{kind} {colour}"{style} points="{_steps(frame, points)}"/>'


def _mark(frame: _Frame, point: Point, index: int) -> str:
    x, y = frame.x(point[0]), frame.y(point[1])
    return f'<circle class="s{index % NUM_COLOURS}"{_hollow(index)} cx="{x}" cy="{y}" r="3"/>'
