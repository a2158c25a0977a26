"""The driver of the studies: a matrix of runs, and one table of their figures.

    python -m benchmarks.studies.NAME [--seeds 1,2] [--rows ROW ...] [--jobs 2] [--out FOLDER]
                                      [--report] [train:KEY=VALUE collect:... evaluate:...]

Called again it continues: a completed run is kept, a stopped one resumes. `--report` only writes
the table again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scipy import stats

EXAMPLES = f"--config-dir={Path(__file__).resolve().parents[2] / 'examples/conf'}"
MODELS = ("base", "sft", "reward", "ppo")
MEASURE = (
    "val/gold_win_rate",
    "val/kl_per_token",
    "val/kl_per_response",
    "val/score",
    "val/response_length",
    "val/distinct_2",
    "val/refusal_rate",
)
_BEST_OF = re.compile(r"best_of/(\d+)/")


@dataclass(frozen=True)
class Row:
    """A row of a study: the command line of its runs without the seed.

    Args:
        words: of the command line; `+experiment=NAME` is that of a training.
        command: `train`, `collect` or `evaluate`.
        starts_from: a kind of model, or a key such as `data.path` -> the row above that makes it.
        vary: values of each key; every combination is a setting of its own.
        published: what others report of this row, by metric.
        setting: the values of `vary` that its runs have.
    """

    words: Sequence[str]
    command: str = "train"
    starts_from: Mapping[str, str] = field(default_factory=dict)
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)

    def settings(self) -> dict[str, list[str]]:
        """Return the words of each combination by its name, such as `kl_coef=0.1`."""
        found = {}
        for values in itertools.product(*self.vary.values()):
            words = [f"{k}={v}" for k, v in zip(self.vary, values, strict=True)]
            found[" ".join(word.partition("=")[0].split(".")[-1] + word[word.index("=") :]
                           for word in words)] = words  # fmt: skip
        return found


@dataclass(frozen=True)
class Study:
    """A study: its rows, the seeds of every setting, and the metrics that are columns.

    Args:
        name: of the folder below `outputs/studies`.
        rows: by name; a row that others start from stands above them.
        shared: words of all runs, by command.
        also: prints more of the results, `(row, setting) -> seed -> Result`.
    """

    name: str
    rows: Mapping[str, Row]
    seeds: Sequence[int] = (1,)
    shared: Mapping[str, Sequence[str]] = field(default_factory=dict)
    measure: Sequence[str] = MEASURE
    also: Callable[[Results], str] | None = None

    @property
    def makers(self) -> set[str]:
        """The rows that others start from."""
        return {name for row in self.rows.values() for name in row.starts_from.values()}


@dataclass(frozen=True)
class Result:
    """A completed run: its final metrics, its seconds, and its folder."""

    metrics: Mapping[str, float]
    seconds: float
    folder: Path
    is_bound: bool = False  # its KL


Results = dict[tuple[str, str], dict[int, Result]]


@dataclass(frozen=True)
class Run:
    """One run of the matrix, in `out/ROW/SETTING/seed_N`."""

    row: str
    setting: str
    seed: int
    folder: Path
    needs: tuple[Path, ...]
    command: Sequence[str]

    @property
    def status(self) -> str:
        """The status of its summary."""
        file = self.folder / "summary.json"
        return json.loads(file.read_text())["status"] if file.is_file() else "not run"

    def start(self) -> str:
        """Run it, or continue it; return the status."""
        if self.status == "completed":
            return self._checked()
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self._words.write_text(json.dumps(self.command[3:]))
        with self.folder.with_suffix(".log").open("w") as log:
            line = [sys.executable, *self.command[1:], f"hydra.run.dir={self.folder}"]
            subprocess.run(line, stdout=log, stderr=subprocess.STDOUT, check=False)
        return self.status

    @property
    def _words(self) -> Path:
        return self.folder.with_suffix(".json")

    def _checked(self) -> str:
        if json.loads(self._words.read_text()) != list(self.command[3:]):
            raise SystemExit(f"{self.folder} is of another command line: give another --out")
        return "completed"


def env(variable: str) -> str:
    """Return the folder that an environment variable names."""
    return os.environ.get(variable, f"{variable}-is-not-set")


def runs_of(
    study: Study, out: Path, seeds: Sequence[int], more: Mapping[str, Sequence[str]]
) -> list[Run]:
    """Return the runs of a study, all rows of a seed before the next seed."""
    found = []
    for seed, (name, row) in itertools.product(seeds, study.rows.items()):
        for setting, values in row.settings().items():
            place = out.joinpath(name, *filter(None, [re.sub(r"[^\w.=+-]", "_", setting)[:80]]))
            words = [*study.shared.get(row.command, ()), *row.words, *values]
            words += [f"seed={seed}", f"paths.artifacts={out / 'artifacts'}"]
            words += [f"paths.outputs={out / 'prerequisites'}"]
            publish = name in study.makers
            words += [f"artifacts.publish={_made(out, name, seed)}"] if publish else []
            words += [f"paths.publish={str(publish).lower()}"] * (row.command != "evaluate")
            for key, maker in row.starts_from.items():
                key = f"artifacts.{key}" if key in MODELS else key
                words.append(f"{key}={_made(out, maker, seed)}")
            words += more.get(row.command, ())
            words += ["resume=auto"] * (row.command != "evaluate")
            line = ["python", "-m", f"rlhf_lightning.{row.command}", EXAMPLES]
            line += _last_of_each(words)
            needs = tuple(_made(out, maker, seed) for maker in row.starts_from.values())
            found.append(Run(name, setting, seed, place / f"seed_{seed}", needs, line))
    return found


def _made(out: Path, row: str, seed: int) -> Path:
    """Return the folder of the model or records that a row makes for others."""
    return out / "made" / row / f"seed_{seed}"


def _last_of_each(words: Sequence[str]) -> list[str]:
    """Return the words without those whose key a later one has: Hydra refuses a group twice."""
    return list({word.lstrip("+~").partition("=")[0]: word for word in words}.values())


def allow_targets() -> None:
    """Let the runs name classes of benchmarks/, examples/ and tests/own, beside the user's."""
    more = os.environ.get("RLHF_ALLOWED_TARGETS", "").split(",")
    found = dict.fromkeys(filter(None, [*more, "benchmarks.", "examples.", "tests.own."]))
    os.environ["RLHF_ALLOWED_TARGETS"] = ",".join(found)


def execute(runs: Sequence[Run], jobs: int) -> None:
    """Run what is not completed, several at a time, each after those that it needs."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    allow_targets()
    futures: dict[tuple[str, int], Future[str]] = {}

    def one(run: Run, before: Sequence[Future[str]]) -> str:
        if any(future.result() != "completed" for future in before):
            status = "not run"
        else:
            status = run.start()
        print(f"{run.row} {run.setting} seed {run.seed}: {status}", flush=True)  # noqa: T201
        return status

    with ThreadPoolExecutor(jobs) as pool:
        for run in runs:  # those that others need come first, so none waits for a queued one
            before = [futures[p.parent.name, run.seed] for p in run.needs
                      if (p.parent.name, run.seed) in futures]  # fmt: skip
            futures[run.row, run.seed] = pool.submit(one, run, before)
    for future in futures.values():
        future.result()


def results_of(runs: Sequence[Run]) -> Results:
    """Return the completed runs by row and setting; best of n has a setting for each n."""
    found: Results = {}
    for run in runs:
        if run.status != "completed":
            continue
        summary = json.loads((run.folder / "summary.json").read_text())
        metrics = {k: v for k, v in summary["metrics"].items() if v is not None}
        result = Result(metrics, summary["seconds"].get("total", 0.0), run.folder)
        sizes = sorted({int(m[1]) for key in metrics if (m := _BEST_OF.match(key))} - {1})
        for size in sizes:
            head = f"best_of/{size}/"
            of_size = {
                f"val/{k.removeprefix(head)}": v for k, v in metrics.items() if k.startswith(head)
            }
            baseline = {f"val/baseline_{k}": metrics.get(f"best_of/1/{k}") for k in ("gold",)}
            known = of_size | {k: v for k, v in baseline.items() if v is not None}
            setting = f"{run.setting} n={size}".strip()
            found.setdefault((run.row, setting), {})[run.seed] = Result(
                known, result.seconds, run.folder, is_bound=True
            )
        if not sizes:
            found.setdefault((run.row, run.setting), {})[run.seed] = result
    return found


def interval(values: Sequence[float]) -> str:
    """Return a mean with Student's 95 % interval over seeds."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.3f} ({mean - half:.3f} to {mean + half:.3f})"


def table(study: Study, results: Results, num_seeds: int) -> str:
    """Return the means over seeds, in Markdown; of one seed the run's own interval over prompts."""
    measured = {m for found in results.values() for r in found.values() for m in r.metrics}
    columns = [metric for metric in study.measure if metric in measured]
    lines = [["row", "setting", "seeds", *columns, "minutes"]]
    for (name, setting), found in results.items():
        cells = [name, setting, f"{len(found)} of {num_seeds}"]
        for metric in columns:
            values = [r.metrics[metric] for r in found.values() if metric in r.metrics]
            cell = interval(values) if values else ""
            first = next(iter(found.values())).metrics
            if len(values) == 1 and f"{metric}_low" in first:
                cell += f" ({first[f'{metric}_low']:.3f} to {first[f'{metric}_high']:.3f})"
            if metric in study.rows[name].published:
                cell += f"; published {study.rows[name].published[metric]:g}"
            cells.append(cell)
        minutes = statistics.fmean(r.seconds for r in found.values()) / 60
        lines.append([*cells, f"{minutes:.1f}"])
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(study: Study, arguments: Sequence[str] | None = None) -> None:
    """Run a study's command line."""
    parser = argparse.ArgumentParser(description=f"the study {study.name}")
    parser.add_argument("--seeds", type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--rows", nargs="+", choices=study.rows, default=list(study.rows))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("outputs/studies") / study.name)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("words", nargs="*", metavar="COMMAND:KEY=VALUE")
    options = parser.parse_intermixed_args(arguments)
    more: dict[str, list[str]] = {"train": [], "collect": [], "evaluate": []}
    for word in options.words:
        command, colon, rest = word.partition(":")
        if not colon or command not in more:
            parser.error(f"{word}: write train:KEY=VALUE, collect: or evaluate:")
        more[command].append(rest)
    out, seeds = options.out.absolute(), options.seeds or list(study.seeds)
    runs = [run for run in runs_of(study, out, seeds, more) if run.row in options.rows]
    if not options.report:
        execute(runs, options.jobs)
    results = results_of(runs)
    text = table(study, results, len(seeds)) + "\n"
    if study.also is not None:
        text += f"\n{study.also(results)}\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(text)
    print(text)  # noqa: T201
    failed = [run for run in runs if run.status != "completed"]
    if failed:
        names = ", ".join(f"{run.row} {run.setting} seed {run.seed}" for run in failed)
        raise SystemExit(f"{len(failed)} of {len(runs)} runs have not completed: {names}")
