"""The console output of a run: a beginning, progress, and a last screen."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.file_proxy import FileProxy
from rich.markup import escape
from rich.panel import Panel
from rich.progress import Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.callbacks.iterations import current_iteration, fresh_metrics, last_iteration
from rlhf_lightning.callbacks.run_tables import describe_rollout
from rlhf_lightning.modules.on_policy import OnPolicyModule
from rlhf_lightning.reports.charts import looked_at_first
from rlhf_lightning.runs.doctor_log import coverage_of, read_events
from rlhf_lightning.runs.folder import RunFolder, from_here, read_samples
from rlhf_lightning.runs.metric_catalog import counted, duration, quantity
from rlhf_lightning.runs.summary import Summary
from rlhf_lightning.runs.verdict import verdict
from rlhf_lightning.text.messages import visible

KEY_WIDTH = 34  # of the column of names: a pipeline's are long, and messages need the room
_SHOWN = 6  # metrics of a bar or a line
_SHOWN_ANSWERS = 5
_LONGEST_ANSWER = 300  # characters
_LONGEST_PROMPT, _LONGEST_RESPONSE = 60, 100  # characters, during training
_BETWEEN = " · "  # two metrics
_COLOURS = {"good": "green", "bad": "red", "neutral": "yellow", "undecided": "bright_black"}


class ProgressBar(RichProgressBar):
    """Lightning's bar over what one looks at first; a line now and then where there is no tty.

    Args:
        stage: named at the left of a line.
        every_n_seconds: time between two lines on a pipe or in a log file.
        console: arguments of rich's `Console`, which writes to standard output by default.
    """

    def __init__(self, stage: str = "", *, every_n_seconds: float = 10.0, **console: Any) -> None:
        self.console = Console(highlight=False, soft_wrap=True, **console)
        theme = RichProgressBarTheme(metrics_text_delimiter=_BETWEEN)
        super().__init__(4 * self.console.is_terminal, theme=theme, console_kwargs=console)
        self.stage, self.every_n_seconds = stage, every_n_seconds
        self._latest: dict[str, float] = {}
        self._started = self._next_line = 0.0
        self._start_iteration = 0
        self._written: tuple[int, dict[str, Any]] | None = None  # iteration and metrics of a line

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the latest values of the metrics that one looks at first, as text."""
        self._latest |= {} if trainer.sanity_checking else fresh_metrics(trainer)
        names = looked_at_first(self._latest)[:_SHOWN]
        return {quantity(name).label: quantity(name).show(self._latest[name]) for name in names}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock and, on a tty, the bar."""
        super().on_train_start(trainer, pl_module)
        if self.progress is not None:
            self.progress.columns = (_TwoLines(self.progress),)
            self.progress.speed_estimate_period = math.inf  # iterations may take minutes
            _redirect_log()
        self._started = time.monotonic()
        self._next_line = self._started + min(self.every_n_seconds, 2.0)
        self._start_iteration = current_iteration(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *rest: Any
    ) -> None:
        """Move on by one iteration; now and then show a response of its rollout."""
        super().on_train_batch_end(trainer, pl_module, outputs, *rest)
        self.get_metrics(trainer, pl_module)  # Lightning has forgotten them at the end of the epoch
        if (now := time.monotonic()) >= self._next_line:
            self._next_line = now + self.every_n_seconds
            self._write_line(trainer, pl_module)
            if self._enabled and isinstance(outputs, Mapping) and "rollout" in outputs:
                self._write_completion(cast(OnPolicyModule, pl_module), outputs["rollout"])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take what the validation measured."""
        super().on_validation_end(trainer, pl_module)
        self.get_metrics(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the bar; write a last line, unless the one before has its iteration and metrics."""
        self._stop_progress()
        self._write_line(trainer, pl_module)

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """Return what is being done, the bar, its iteration, the time left and the speed."""
        words, bar, count, _, speed = super().configure_columns(trainer)
        return [words, bar, count, TimeRemainingColumn(), TextColumn("left"), speed]

    def _get_train_description(self, current_epoch: int) -> str:
        words = escape(f"{self.stage} iteration".strip())  # as wide as the bar of a validation's
        return f"{words:{len(self.validation_description)}}"

    def _stop_progress(self) -> None:
        super()._stop_progress()
        _redirect_log()

    def _write_completion(self, module: OnPolicyModule, rollout: RolloutBatch) -> None:
        """Print the first response of a rollout with its prompt and score, on one line."""
        skip = module.sampling.skip_special_tokens
        (row,) = describe_rollout(rollout, module.tokenizer, 1, skip_special_tokens=skip)
        score = "" if row["score"] is None else f"score {row['score']:.2f}  "
        prompt = _one_line(row["prompt"], _LONGEST_PROMPT)
        response = _one_line(row["response"], _LONGEST_RESPONSE) or "(empty)"
        above = self.console if self.progress is None else self.progress.console  # the bar
        above.print(Text(f"sample  {score}{prompt} -> {response}", "dim"))

    def _write_line(self, trainer: Trainer, module: LightningModule) -> None:
        if not self._enabled or self.console.is_terminal:
            return
        iteration, total = current_iteration(trainer), last_iteration(trainer)
        metrics = self.get_metrics(trainer, module)
        if self._written == (iteration, metrics):
            return
        self._written = iteration, metrics
        passed, done = time.monotonic() - self._started, iteration - self._start_iteration
        parts = [f"{self.stage} {iteration}/{total}".strip()]
        parts += [f"{100 * iteration / total:.0f} %"] if total else []
        if iteration >= total:
            parts.append(f"took {duration(passed)}")
        elif done > 0:
            parts.append(f"{duration(passed / done * (total - iteration))} left")
        parts += [f"{label} {value}" for label, value in metrics.items()]
        self.console.print(" · ".join(parts), markup=False)


class _TwoLines(ProgressColumn):
    """A bar, and beneath it as many of the metrics, which are the last column, as fit on a line.

    Args:
        progress: whose columns they are.
    """

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress
        self.columns: tuple[Any, ...] = progress.columns

    def render(self, task: Task) -> RenderableType:
        """Return both lines; the bar alone while that of a validation is beneath it."""
        *columns, metrics = (column(task) for column in self.columns)
        line, told = Table.grid(padding=(0, 1)), ""
        line.add_row(*columns)
        for part in str(metrics).split(_BETWEEN):
            longer = _BETWEEN.join(filter(None, (told, part)))
            told = longer if cell_len(longer) <= self.progress.console.width else told
        if not told or sum(each.visible for each in self.progress.tasks) > 1:
            return line
        return Group(line, Text(told, "italic", no_wrap=True, overflow="ellipsis"))


def _redirect_log() -> None:
    """Let the log be printed above a bar, or again to its streams where there is none now.

    A handler holds the stream that it was made with, and would write into the bar.
    """
    streams = (sys.stdout, sys.stderr)
    above: dict[Any, Any] = {
        each.rich_proxied_file: each for each in streams if isinstance(each, FileProxy)
    }
    for named in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(named, "handlers", ()):
            if isinstance(handler, logging.StreamHandler):
                beneath = getattr(handler.stream, "rich_proxied_file", handler.stream)
                handler.setStream(above.get(beneath, beneath))


def print_start(
    title: str, folder: RunFolder, settings: Mapping[str, object], *, console: Console | None = None
) -> None:
    """Print what begins, with which settings, and where it is going to be."""
    console = console or Console(highlight=False)
    _print_panel(title, _grid(settings.items()), "dim", console)
    _print_line("run folder", from_here(folder.path), console)


def print_verdict(
    summary: Summary, folder: RunFolder, *, wandb: str | None = None, console: Console | None = None
) -> None:
    """Print the last screen: what was learnt, the gates, and where everything is.

    Args:
        summary: of the run.
        folder: of the run.
        wandb: where Weights & Biases shows it.
        console: None for standard output.
    """
    console = console or Console(highlight=False)
    result = verdict(summary)
    rows = [(f.label, f"{f.value}  ({f.note})" if f.note else f.value) for f in result.facts]
    rows += [(f"gate {g.name}", f"{g.word}  {g.reason}".rstrip()) for g in summary.gates]
    if (coverage := coverage_of(read_events(folder.doctor))) is not None:
        rows += [("doctor", f"{coverage.describe()}, {counted(len(summary.alerts), 'alert')}")]
        if coverage.idle:
            idle = counted(sum(map(len, coverage.idle.values())), "detector")
            rows.append(("doctor idle", f"{idle}: {folder.doctor.name} says why"))
    for alert in summary.alerts:
        until = "" if alert["cleared_at"] is None else f" to {alert['cleared_at']}"
        told = f"iteration {alert['raised_at']}{until}  {alert['message']}"
        rows.append((f"doctor {alert['level']}", told))
    for action in summary.actions:
        told = f"iteration {action['iteration']}  {action['message']}"
        rows.append((f"doctor {action['kind']}", told))
    head = Text()
    if result.number:
        head.append(result.number, style=f"bold {_COLOURS[result.number_tone]}")
        head.append(f" {result.caption}\n")
    head.append(f"{result.sentence}\n")
    body, colour = Group(head, _grid(rows)), _COLOURS[result.tone]
    _print_panel(f"{summary.title}: {summary.status}", body, colour, console)
    _print_answers(folder, console)
    places = {
        "report": folder.report,
        "samples": folder.samples,
        "exported model": folder.export,
        "checkpoints": folder.checkpoints,
        "profile": folder.profile / "table.txt",
    }
    for name in (name for name, path in places.items() if path.exists()):
        _print_line(name, from_here(places[name]), console)
    if wandb is not None:
        _print_line("W&B", wandb, console)


def _print_answers(folder: RunFolder, console: Console) -> None:
    """Print the baseline's and the policy's responses to the first few held-out prompts."""
    compared = [s for s in read_samples(folder.samples) if s.get("baseline_response") is not None]
    last = max((sample["iteration"] for sample in compared), default=0)
    for sample in [one for one in compared if one["iteration"] == last][:_SHOWN_ANSWERS]:
        rows = []
        for name, key, score in (
            ("prompt", "prompt", ""),
            ("baseline", "baseline_response", "baseline_score"),
            ("policy", "response", "score"),
        ):
            scored = "" if (value := sample.get(score)) is None else f" {value:.2f}"
            text = printable(_one_line(str(sample[key]), _LONGEST_ANSWER))
            rows.append((f"{name}{scored}", text))
        console.print(_grid(rows), Text(""))


def printable(text: str) -> Text:
    """Return a text without escape sequences, which a terminal would obey; an empty one says so."""
    return Text(visible(text)) if text.strip() else Text("(empty)", "dim")


def _one_line(text: str, longest: int) -> str:
    """Return a text on one line, cut between characters: some scripts have no spaces."""
    line = " ".join(visible(text).split())
    return line if len(line) <= longest else f"{line[:longest]} ..."


def _print_panel(title: str, body: RenderableType, colour: str, console: Console) -> None:
    console.print(Panel(body, title=escape(title), title_align="left", border_style=colour))


def _print_line(name: str, text: str, console: Console) -> None:
    """Print what one copies on a separate line that no box breaks.

    A terminal that is too narrow wraps such a line itself, and copies it as one.
    """
    console.print(Text.assemble((f"{name:<16}", "dim"), text), soft_wrap=True)


def _grid(rows: Iterable[tuple[str, object]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", overflow="fold", max_width=KEY_WIDTH)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), value if isinstance(value, Text) else Text(str(value)))
    return table
