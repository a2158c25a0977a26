"""The table under the progress bar: each measure now, at first, its course, and what is healthy."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.table import Table
from rich.text import Text

from rlhf_lightning.runs.quantities import number, percent, quantity

COURSE_LENGTH = 16  # characters, one a value or a mean of neighbours
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDE = 76  # below it the course is left out
_REST = 70  # what the other columns take where they have their widest entries
_KEPT = 4096


class History:
    """The values of some metrics, iteration by iteration."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.first: dict[str, float] = {}
        self.values: dict[str, deque[float]] = {name: deque(maxlen=_KEPT) for name in names}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Note the values of one iteration; a metric that it did not measure gets none."""
        for name in self.names:
            if name in metrics:
                self.first.setdefault(name, metrics[name])
                self.values[name].append(metrics[name])


def measures_table(history: History, *, width: int) -> Table:
    """Return one row a metric that was measured; values outside the healthy range in red.

    Args:
        history: the values so far.
        width: of the terminal, in characters.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=34)
    for title in ("now", "at first"):
        table.add_column(title, justify="right", no_wrap=True)
    if width >= _WIDE:
        table.add_column("course", no_wrap=True)
    table.add_column("healthy", no_wrap=True, style="dim")
    length = min(COURSE_LENGTH, max(width - _REST, 2))
    for name in history.names:
        values = history.values[name]
        if not values:
            continue
        healthy = quantity(name).healthy
        now = Text(_short(name, values[-1]), style="" if _within(values[-1], healthy) else "red")
        cells: list[Text] = [
            Text(quantity(name).label),
            now,
            Text(_short(name, history.first[name])),
        ]
        if width >= _WIDE:
            cells.append(Text(course(list(values), length), style="cyan"))
        cells.append(Text(_range(name, healthy)))
        table.add_row(*cells)
    return table


def course(values: Sequence[float], length: int = COURSE_LENGTH) -> str:
    """Return the values as a line of blocks, from the lowest to the highest; gaps are spaces."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    if len(values) > length:
        edges = [round(i * len(values) / length) for i in range(length + 1)]
        values = [_mean(values[a:b]) for a, b in pairwise(edges)]
        finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    top = len(_BLOCKS) - 1
    span = high - low
    return "".join(
        (_BLOCKS[round((value - low) / span * top) if span else top // 2])
        if math.isfinite(value)
        else " "
        for value in values
    )


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _within(value: float, healthy: tuple[float, float] | None) -> bool:
    # Below a range that is a warning of too much, such as that of a KL, a run has only begun.
    if not math.isfinite(value):
        return False
    if healthy is None:
        return True
    low, high = healthy
    return value <= high and (value >= low or (low > 0 and high > 2 * low))


def _range(name: str, healthy: tuple[float, float] | None) -> str:
    if healthy is None:
        return ""
    low, high = healthy
    if quantity(name).unit == "share":
        return f"{100 * low:g} to {100 * high:g} %"
    return f"{low:g} to {high:g}"


def _short(name: str, value: float) -> str:
    return percent(value) if quantity(name).unit == "share" else number(value)
