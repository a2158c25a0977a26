"""The run folder: where everything of one run stands, and the two tables that grow with it."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_lightning.misfit import near_path
from rlhf_lightning.runs.atomic import write_text

ITERATION = "iteration"
RUN_YAML = "run.yaml"
# Beside `config`, without interpolations and what is private: for the page.
RESOLVED = "resolved.yaml"


class _Below:
    """A path below a run folder."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def __get__(self, folder: RunFolder | None, owner: type[RunFolder]) -> Path:
        return Path(*self.parts) if folder is None else folder.path.joinpath(*self.parts)


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run; nothing is created before the first write.

    Args:
        path: the folder, `outputs/<stage>/<date>_<time>` unless the user chose another.
    """

    path: Path

    def __post_init__(self) -> None:
        """Accept a string for the path, and `~` for the home folder."""
        object.__setattr__(self, "path", Path(self.path).expanduser())

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    #: `summary.json`: stage, status, final metrics, gates.
    summary = _Below("summary.json")
    #: `metrics.csv`: one row an iteration.
    metrics = _Below("metrics.csv")
    #: `samples.jsonl`: prompts and responses.
    samples = _Below("samples.jsonl")
    #: `distributions.jsonl`: the values behind the means, a rollout or an evaluation a line.
    distributions = _Below("distributions.jsonl")
    #: `doctor.jsonl`: alerts and interventions, an event a line.
    doctor = _Below("doctor.jsonl")
    #: `checkpoints/`: for resume; `last.ckpt` and, with something monitored, `best.ckpt`.
    checkpoints = _Below("checkpoints")
    #: `checkpoints/last.ckpt`, a link to the newest complete checkpoint.
    last_checkpoint = _Below("checkpoints", "last.ckpt")
    #: `checkpoints/best.ckpt`, a link to the best by the monitored metric.
    best_checkpoint = _Below("checkpoints", "best.ckpt")
    #: `report.html`, self-contained.
    report = _Below("report.html")
    #: `export/`: Hugging Face folder, or one such folder a model.
    export = _Below("export")
    #: `faults/`: batches at which a run stopped, one folder an iteration.
    faults = _Below("faults")
    #: `profile/`: with `debug=profile`, a table and a trace of where the time went.
    profile = _Below("profile")
    #: `traceback.txt`: of a run that failed.
    traceback = _Below("traceback.txt")
    #: `wandb/`: what Weights & Biases writes.
    wandb = _Below("wandb")
    #: `run.yaml`: what its command line set; `--config run.yaml` runs it again.
    run_yaml = _Below(RUN_YAML)
    #: `.hydra/config.yaml`: the composed configuration.
    config = _Below(".hydra", "config.yaml")

    def create(self) -> RunFolder:
        """Make the folder if it is missing and return self."""
        self.path.mkdir(parents=True, exist_ok=True)
        return self


def near_run(path: Path, part: Path = RunFolder.checkpoints) -> str:
    """Return "; did you mean ...?" for the path like a missing one, else for a run near to it.

    That is the newest below a folder, or the one around it.

    Args:
        path: what was given.
        part: what tells the folder that is meant, which has it; by default that of a training.
    """
    below = (one for depth in range(4) for one in path.glob(f"{'*/' * depth}{part}"))
    newest = max(below, key=lambda one: one.stat().st_mtime, default=None)
    around = (one / part for one in path.parents if (one / part).exists())
    near = newest or next(around, None)
    told = f"; did you mean {near.parent}?" if near and near.parent != path else ""
    return near_path(path, Path.exists) or told


def from_here(path: Path) -> str:
    """Return a path as short as it can be typed: below the working folder without that folder."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def run_behind(source: str) -> str:
    """Return the run of a command whose export a model is; another folder or hub name as it is."""
    folder = RunFolder(Path(source).parent)
    exported = folder.export == Path(source) and folder.config.is_file()
    return str(folder.path) if exported else source


class MetricsAppender:
    """Append rows to `metrics.csv`, one an iteration, each flushed when it is written.

    The first column is `iteration`. A metric that appears later gets a new column: the file is
    then rewritten in one step with the wider header. Numbers are written so that reading them
    gives the same float64 back; an empty cell means "not measured at this iteration".
    """

    def __init__(self, path: Path | str) -> None:
        """Write to `path`, continuing what is already there."""
        self.path = Path(path)
        self._columns = [ITERATION]
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file), self._columns)

    def append(self, iteration: int, values: Mapping[str, float]) -> None:
        """Add the row of `iteration`.

        Raises:
            ValueError: if `values` has a key `iteration`, which is the x-axis.
        """
        if ITERATION in values:
            raise ValueError("a metric is named 'iteration', which is the x-axis: rename it")
        new = [name for name in values if name not in self._columns]
        if new or not self.path.exists():
            rows = read_metrics(self.path)
            self._columns += new
            self._rewrite(rows)
        row = {ITERATION: iteration, **values}
        cells = [_cell(row.get(name)) for name in self._columns]
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow(cells)

    def truncate(self, iteration: int) -> None:
        """Keep the rows up to and including `iteration`, for a run that resumes there.

        A line that a kill cut short goes too, and so do columns that are left without a value:
        what remains is what a run stopped at `iteration` would have written.
        """
        rows = [row for row in read_metrics(self.path) if row[ITERATION] <= iteration]
        kept = [c for c in self._columns[1:] if any(c in row for row in rows)]
        self._columns = [ITERATION, *kept]
        if rows:
            self._rewrite(rows)
        else:
            self.path.unlink(missing_ok=True)

    def _rewrite(self, rows: Sequence[Mapping[str, float]]) -> None:
        lines = ([_cell(row.get(name)) for name in self._columns] for row in rows)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self._columns, *lines])
        write_text(self.path, text.getvalue())


class SamplesAppender:
    """Append lines to `samples.jsonl`, each a JSON object with `iteration`, flushed at once."""

    def __init__(self, path: Path | str) -> None:
        """Write to `path`, continuing what is already there."""
        self.path = Path(path)

    def append(self, iteration: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Add one line a sample; numbers that are not finite become null."""
        lines = [to_json({ITERATION: iteration, **sample}) + "\n" for sample in samples]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A lone surrogate, which UTF-8 does not have, is written as its JSON escape.
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(lines)

    def truncate(self, iteration: int) -> None:
        """Keep the lines up to and including `iteration`; a line cut short by a kill goes too."""
        self._keep(lambda sample: sample[ITERATION] <= iteration)

    def drop(self, key: str) -> None:
        """Drop the lines that have `key`, so that what writes them can be done again."""
        self._keep(lambda sample: key not in sample)

    def _keep(self, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        if self.path.exists():  # its own file: what `read_samples` leaves out stays
            kept = (line for line, sample in _lines(self.path) if wanted(sample))
            write_text(self.path, "".join(line.decode() + "\n" for line in kept))


def read_metrics(path: Path | str) -> list[dict[str, float]]:
    """Return the rows of a `metrics.csv`, each without the cells that are empty.

    Lines that do not have the width of the header, as a kill in the middle of a write leaves
    them, are left out. A missing file has no rows.

    Raises:
        ValueError: if it is not what `MetricsAppender` writes.
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        text = path.read_text("utf-8")
        # A line counts when its end was written.
        lines = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))
        header = lines[0] if lines else [ITERATION]
        whole = (zip(header, line, strict=True) for line in lines[1:] if len(line) == len(header))
        rows = [{name: float(cell) for name, cell in line if cell != ""} for line in whole]
        if header[0] != ITERATION or not all(ITERATION in row for row in rows):
            raise ValueError("not each row begins with its iteration")
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read ({error}): restore it, or move it away") from error
    return rows


def read_samples(path: Path | str) -> list[dict[str, Any]]:
    """Return the lines of a `samples.jsonl` that are whole; a missing file has none."""
    return [sample for _, sample in _lines(Path(path))] if Path(path).exists() else []


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the lines that are whole, each with what it says."""
    # Not splitlines: it also breaks at characters that JSON leaves inside a string.
    for line in path.read_bytes().split(b"\n")[:-1]:
        with suppress(ValueError):
            yield line, json.loads(line)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return strict JSON; NaN and infinities, which JSON does not have, become null."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if hasattr(value, "item"):  # a number of numpy or a tensor of one element
        return _finite(value.item())
    return value


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    number = float(value)
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)
