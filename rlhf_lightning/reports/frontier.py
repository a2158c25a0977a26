"""Charts of several runs: win rate against KL, its frontier, and lines of objectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhf_lightning.reports.charts import NUM_COLOURS, Point, dash, hollow, nice_ticks, svg
from rlhf_lightning.reports.html import text
from rlhf_lightning.reports.several import COST, Run
from rlhf_lightning.runs.metric_catalog import number, percent, quantity

_WIDTH, _HEIGHT = 400, 250
_LINES = 760, 400, 130  # width, height and room for names at the right
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 16, 40
KL_LABEL = "KL from SFT, nats a token"


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points that none beats in both: less KL and more wins, by rising KL."""
    kept: list[Point] = []
    for kl, rate in sorted(points, key=lambda p: (p[0], -p[1])):
        if not kept or rate > kept[-1][1]:
            kept.append((kl, rate))
    return kept


def frontier_chart(runs: Sequence[Run], name: str) -> str:
    """Return win rate over KL as an `<svg>`, a dot a run, the frontier as a line.

    "" where fewer than two runs have both.
    """
    places = {
        index: (kl, rate)
        for index, run in enumerate(runs)
        if (kl := run.metrics.get(COST)) is not None and (rate := run.metrics.get(name)) is not None
    }
    if len(places) < 2:
        return ""
    plane = _Plane([kl for kl, _ in places.values()], [rate for _, rate in places.values()])
    parts = plane.axes()
    line = " ".join(f"{x},{y}" for x, y in map(plane.place, frontier(list(places.values()))))
    parts.append(f'<polyline class="reference" fill="none" points="{line}"/>')
    for index, point in places.items():
        x, y = plane.place(point)
        colour = f"s{index % NUM_COLOURS}"
        parts.append(f'<circle class="{colour}"{hollow(index)} cx="{x}" cy="{y}" r="5"/>')
        parts.append(_dot_name(x, y, runs[index].label, index))
    title = f"{quantity(name).label} over KL"
    return svg(title, _WIDTH, _HEIGHT, "".join(parts))


@dataclass(frozen=True)
class Line:
    """The settings of one objective: KL, and gain with its interval, in any order."""

    label: str
    points: Sequence[tuple[float, float, float, float]]


def lines_chart(
    title: str,
    lines: Sequence[Line],
    *,
    over: str = KL_LABEL,
    show: Callable[[float], str] = percent,
) -> str:
    """Return gain over KL as an `<svg>`, a line an objective, with the intervals of its settings.

    "" where nothing was measured. A bound that is not a number is not drawn.

    Args:
        title: of the chart.
        lines: their points may be of another gain over another distance.
        over: label of the distance.
        show: a gain as text.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    heights = [value for _, *values in points for value in values if math.isfinite(value)]
    plane = _Plane([point[0] for point in points], heights, *_LINES)
    parts, below = plane.axes(over, show), 0.0
    drawn = [(sorted(line.points), index) for index, line in enumerate(lines) if line.points]
    # Names stand in a column at the right, in the order of the ends of their lines.
    for settings, index in sorted(drawn, key=lambda item: plane.place(item[0][-1][:2])[1]):
        colour = f"s{index % NUM_COLOURS}"
        steps = " ".join("{},{}".format(*plane.place(point[:2])) for point in settings)
        parts.append(f'<polyline class="line {colour}"{dash(index)} points="{steps}"/>')
        for kl, gain, low, high in settings:
            x, y = plane.place((kl, gain))
            if math.isfinite(low) and math.isfinite(high):
                top, bottom = (plane.place((kl, bound))[1] for bound in (high, low))
                ends = f"{x},{top} {x},{bottom}"
                parts.append(f'<polyline class="faint {colour}" points="{ends}"/>')
            parts.append(f'<circle class="{colour}" cx="{x}" cy="{y}" r="3.5"/>')
        below = max(below + 14, y)
        edge = plane.width - plane.right
        parts.append(f'<polyline class="faint {colour}" points="{x},{y} {edge},{below}"/>')
        name = text(lines[index].label)
        parts.append(f'<text class="dot-name" x="{edge + 5}" y="{below + 4:.1f}">{name}</text>')
    return svg(title, plane.width, plane.height, "".join(parts), wide=True)


class _Plane:
    """KL from 0 to the right, a rate upwards."""

    def __init__(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        width: int = _WIDTH,
        height: int = _HEIGHT,
        right: int = _RIGHT,
    ) -> None:
        self.width, self.height, self.right = width, height, right
        self.x_ticks = nice_ticks(0.0, max(*xs, 1e-9) * 1.08, 5)
        # What lies within 0 and 1, as rates do, has no tick outside of them.
        floor, ceiling = min(0.0, *ys), max(1.0, *ys)
        self.y_ticks = nice_ticks(max(min(ys) - 0.02, floor), min(max(ys) + 0.02, ceiling), 5)
        self.x_end = max(self.x_ticks[-1], max(xs))
        self.low, self.high = min(self.y_ticks[0], *ys), max(self.y_ticks[-1], *ys)

    def place(self, point: Point) -> Point:
        """Return the pixel of a point."""
        x = _LEFT + point[0] / (self.x_end or 1) * (self.width - _LEFT - self.right)
        share = (point[1] - self.low) / ((self.high - self.low) or 1)
        return round(x, 1), round(self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM), 1)

    def axes(self, over: str = KL_LABEL, show: Callable[[float], str] = percent) -> list[str]:
        """Return grid and labels."""
        parts = []
        for tick in self.y_ticks:
            _, y = self.place((0, tick))
            end = self.width - self.right
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{end}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{y + 3.5}">{show(tick)}</text>')
        for tick in self.x_ticks:
            x, _ = self.place((tick, self.low))
            parts.append(_label(x, self.height - 22, number(tick, like=self.x_end)))
        middle = (_LEFT + self.width - self.right) / 2
        return [*parts, _label(middle, self.height - 5, over)]


def _dot_name(x: float, y: float, label: str, index: int) -> str:
    anchor = "end" if x > _WIDTH * 0.6 else "start"
    shift = -7 if anchor == "end" else 7
    up = y + (15 if index % 2 else -7)  # neighbours do not write over each other
    return (
        f'<text class="dot-name" style="text-anchor:{anchor}" x="{x + shift}" y="{up:.1f}">'
        f"{text(label)}</text>"
    )


def _label(x: float, y: float, label: str) -> str:
    return f'<text class="tick" style="text-anchor:middle" x="{x:.1f}" y="{y}">{text(label)}</text>'
