"""The console output of a run: a beginning, progress, and a last screen."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from rlhf_lightning.callbacks.iterations import current_iteration, fresh_metrics, last_iteration
from rlhf_lightning.reports.curves import looked_at_first
from rlhf_lightning.runs.doctor_log import coverage_of, read_events
from rlhf_lightning.runs.folder import RunFolder, from_here
from rlhf_lightning.runs.metric_catalog import duration, quantity
from rlhf_lightning.runs.summary import Summary
from rlhf_lightning.runs.verdict import verdict

COURSE_LENGTH = 16  # characters, one a value or a mean of neighbours
KEY_WIDTH = 34  # of the column of names: a pipeline's are long, and messages need the room
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDE = 76  # below it the course is left out
_REST = 70  # what the other columns take where they have their widest entries
_LINE_METRICS = 6  # of a line on a pipe
_KEPT = 4096  # values of a course
_COLOURS = {"good": "green", "bad": "red", "neutral": "yellow", "undecided": "bright_black"}


def measures_table(history: Mapping[str, Sequence[float]], *, width: int) -> Table:
    """Return one row a metric that was measured; values outside the healthy range in red.

    Args:
        history: the values so far, by metric.
        width: width of the terminal, in characters.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=KEY_WIDTH)
    table.add_column("now", justify="right", no_wrap=True)
    table.add_column("start", justify="right", no_wrap=True)
    if width >= _WIDE:
        table.add_column("trend", no_wrap=True, style="cyan")
    table.add_column("healthy", no_wrap=True, style="dim")
    length = min(COURSE_LENGTH, max(width - _REST, 2))
    for name, values in history.items():
        about = quantity(name)
        now = Text(
            about.show(values[-1]), style="" if _within(values[-1], about.healthy) else "red"
        )
        trend = [course(values[-_KEPT:], length)] if width >= _WIDE else []
        table.add_row(about.label, now, about.show(values[0]), *trend, about.usual)
    return table


def course(values: Sequence[float], length: int = COURSE_LENGTH) -> str:
    """Return the values as a line of blocks, from the lowest to the highest; gaps are spaces."""
    if len(values) > length:
        edges = [round(i * len(values) / length) for i in range(length + 1)]
        values = [_mean(values[a:b]) for a, b in pairwise(edges)]
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, top = min(finite), len(_BLOCKS) - 1
    span = max(finite) - low
    heights = [(value - low) / span * top if span else top // 2 for value in values]
    return "".join(_BLOCKS[round(h)] if math.isfinite(h) else " " for h in heights)


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _within(value: float, healthy: tuple[float, float] | None) -> bool:
    low, high = healthy or (-math.inf, math.inf)
    # Below a range that is a warning of too much, such as that of a KL, a run has only begun.
    begun = low > 0 and high > 2 * low
    return math.isfinite(value) and value <= high and (value >= low or begun)


class ProgressBar(LightningProgressBar):
    """Show iteration, time left and a table of metrics; a line now and then where there is no tty.

    Args:
        stage: named at the left.
        metrics: which to show, of those that are logged, in this order; None for those that one
            looks at first. A line has the first six.
        every_n_seconds: time between two lines on a pipe or in a log file.
        console: where to write; standard output by default.
    """

    def __init__(
        self,
        stage: str = "",
        *,
        metrics: Sequence[str] | None = None,
        every_n_seconds: float = 10.0,
        console: Console | None = None,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.metrics = metrics
        self.every_n_seconds = every_n_seconds
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._enabled = True
        self._live: Live | None = None
        self._history: dict[str, list[float]] = {}
        self._started = 0.0
        self._start_iteration = 0
        self._next_line = 0.0

    def disable(self) -> None:
        """Show nothing; Lightning calls this on every rank but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Show again."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock and, on a tty, the bar."""
        self._started = time.monotonic()
        self._next_line = self._started + min(self.every_n_seconds, 2.0)
        self._start_iteration = current_iteration(trainer)
        if self._enabled and self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4)
            self._live.start()
            self._show(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move on by one iteration."""
        self._note(trainer)
        now = time.monotonic()
        if self._live is not None:
            self._show(trainer)
        elif self._enabled and now >= self._next_line:
            self._next_line = now + self.every_n_seconds
            self._write_line(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say that a validation takes the time now."""
        if not trainer.sanity_checking:
            self._show(trainer, doing="validating")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show what the validation measured."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._note(trainer)
            self._show(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the bar, or a last line, at where training ended."""
        if self._live is not None:
            self._close()
        elif self._enabled:
            self._write_line(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Give the terminal back before the error is printed."""
        self._close()

    def _note(self, trainer: Trainer) -> None:
        fresh = fresh_metrics(trainer)
        for name in looked_at_first(fresh) if self.metrics is None else self.metrics:
            if name in fresh:
                self._history.setdefault(name, []).append(fresh[name])

    def _close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, trainer: Trainer, doing: str = "") -> None:
        """Redraw the bar and the table, on a tty."""
        if self._live is None:
            return
        bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[status]}"),
            console=self.console,
        )
        bar.add_task(
            escape(self.stage) or "training",
            total=last_iteration(trainer),
            completed=current_iteration(trainer),
            status=doing or self._time(trainer),
        )
        shown = {name: self._history[name] for name in self._shown()}
        self._live.update(Group(bar, measures_table(shown, width=self.console.width)))

    def _write_line(self, trainer: Trainer) -> None:
        iteration, total = current_iteration(trainer), last_iteration(trainer)
        parts = [f"{self.stage} {iteration}/{total}".strip()]
        parts += [f"{100 * iteration / total:.0f} %"] if total else []
        parts += filter(None, [self._time(trainer)])
        for name in self._shown()[:_LINE_METRICS]:
            parts.append(f"{quantity(name).label} {quantity(name).show(self._history[name][-1])}")
        self.console.print(" · ".join(parts), markup=False)

    def _shown(self) -> list[str]:
        if self.metrics is None:
            return looked_at_first(self._history)
        return [name for name in self.metrics if name in self._history]

    def _time(self, trainer: Trainer) -> str:
        """Return the time left, or taken; "" before it can be known."""
        iteration, total = current_iteration(trainer), last_iteration(trainer)
        passed = time.monotonic() - self._started
        done = iteration - self._start_iteration
        if iteration >= total:
            return f"took {duration(passed)}"
        return f"{duration(passed / done * (total - iteration))} left" if done > 0 else ""


def print_start(
    title: str,
    folder: RunFolder,
    settings: Mapping[str, object],
    *,
    console: Console | None = None,
) -> None:
    """Print what begins, with which settings, and where it is going to be."""
    console = console or Console(highlight=False)
    table = _grid()
    for name, value in settings.items():
        table.add_row(Text(str(name)), Text(str(value)))
    console.print(Panel(table, title=escape(title), title_align="left", border_style="dim"))
    _print_place("run folder", folder.path, console)


def print_verdict(summary: Summary, folder: RunFolder, *, console: Console | None = None) -> None:
    """Print the last screen: what was learnt, the gates, and where everything is."""
    console = console or Console(highlight=False)
    result = verdict(summary)
    colour = _COLOURS[result.tone]
    table = _grid()
    for fact in result.facts:
        note = f"  ({fact.note})" if fact.note else ""
        table.add_row(Text(fact.label), Text(fact.value + note))
    for gate in summary.gates:
        table.add_row(Text(f"gate {gate.name}"), Text(f"{gate.word}  {gate.reason}".rstrip()))
    coverage = coverage_of(read_events(folder.doctor))
    if coverage is not None:
        alerts = len(summary.alerts)
        told = f"{coverage.describe()}, {alerts} alert{'s' * (alerts != 1)}"
        table.add_row("doctor", Text(told))
        for why, names in coverage.idle.items():
            table.add_row("doctor idle", Text(f"{', '.join(names)}: {why}"))
    for alert in summary.alerts:
        until = "" if alert["cleared_at"] is None else f" to {alert['cleared_at']}"
        told = f"iteration {alert['raised_at']}{until}  {alert['message']}"
        table.add_row(Text(f"doctor {alert['level']}"), Text(told))
    for action in summary.actions:
        told = f"iteration {action['iteration']}  {action['message']}"
        table.add_row(Text(f"doctor {action['kind']}"), Text(told))
    head = Text()
    if result.number:
        head.append(result.number, style=f"bold {_COLOURS[result.number_tone]}")
        head.append(f" {result.caption}\n")
    head.append(f"{result.sentence}\n")
    outer = Table.grid()
    outer.add_row(head)
    outer.add_row(table)
    title = f"{summary.title}: {summary.status}"
    console.print(Panel(outer, title=escape(title), title_align="left", border_style=colour))
    for name, path in (
        ("report", folder.report),
        ("samples", folder.samples),
        ("exported model", folder.export),
        ("checkpoints", folder.checkpoints),
        ("profile", folder.profile / "table.txt"),
    ):
        if path.exists():
            _print_place(name, path, console)


def _print_place(name: str, path: Path, console: Console) -> None:
    """Print a path on a separate line that no box breaks.

    A terminal that is too narrow wraps such a line itself, and copies it as one.
    """
    console.print(Text.assemble((f"{name:<16}", "dim"), from_here(path)), soft_wrap=True)


def _grid() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", overflow="fold", max_width=KEY_WIDTH)
    table.add_column(overflow="fold")
    return table
