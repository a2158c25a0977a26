"""Progress of long work and the time it will take: a bar, or a line now and then."""

from __future__ import annotations

import time
from dataclasses import KW_ONLY, dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from rlhf_lightning.runs.metric_catalog import duration


@dataclass(eq=False)
class WorkProgress:
    """Count what is done of a known amount of work.

    On a terminal it is a bar; elsewhere a line at the beginning, at the end and every few seconds.

    Args:
        what: is being done, in a word or two.
        total: of the work.
        done: how much of it an earlier run did, which says nothing about the speed of this one.
        every_n_seconds: between two lines on a pipe or in a log file.
        console: where to write; standard output by default.
    """

    what: str
    total: int
    _: KW_ONLY
    done: int = 0
    every_n_seconds: float = 10.0
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))

    def __post_init__(self) -> None:
        self._before = self._shown = self.done  # by an earlier run; by the last line
        self._started = self._told = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> WorkProgress:
        self._started = self._told = time.monotonic()
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[status]}"),
                console=self.console,
            )
            self._bar.add_task(
                escape(self.what), total=self.total, completed=self.done, status=self._status()
            )
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif self.done > self._shown or kind is not None:
            self._write_line()

    def advance(self, amount: int, note: str = "") -> None:
        """Count `amount` more as done; `note` says what else there is to say just now."""
        self.done += amount
        if self._bar is not None:
            status = " · ".join(filter(None, (self._status(), note)))
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=self.done, status=escape(status))
        elif time.monotonic() - self._told >= self.every_n_seconds:
            self._told = time.monotonic()
            self._write_line(note)

    def _write_line(self, note: str = "") -> None:
        self._shown = self.done
        share = f"{100 * self.done / self.total:.0f} %" if self.total else ""
        parts = (f"{self.what} {self.done}/{self.total}", share, self._status(), note)
        self.console.print(" · ".join(filter(None, parts)), markup=False)

    def _status(self) -> str:
        passed = time.monotonic() - self._started
        fresh = self.done - self._before
        if self.done >= self.total:
            return f"took {duration(passed)}" if fresh else ""
        return f"{duration(passed / fresh * (self.total - self.done))} left" if fresh else ""
