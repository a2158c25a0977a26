"""`comparison.html`: several runs on one page, for two runs as for the jobs of a sweep."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_lightning.evaluation.comparisons import paired_differences
from rlhf_lightning.evaluation.win_rate import CONFIDENCE
from rlhf_lightning.reports.charts import Figure, Point, Series, line_chart
from rlhf_lightning.reports.curves import looked_at_first
from rlhf_lightning.reports.html import render, text
from rlhf_lightning.reports.samples import figures
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.changes import ABSENT, flatten
from rlhf_lightning.runs.changes import show as show_setting
from rlhf_lightning.runs.folder import ITERATION, RunFolder, read_metrics, read_samples
from rlhf_lightning.runs.metric_catalog import (
    bound_keys,
    capitalized,
    counted,
    ends,
    quantity,
    show,
)
from rlhf_lightning.runs.outcome import FEW
from rlhf_lightning.runs.public_config import public_config
from rlhf_lightning.runs.reading import read_yaml
from rlhf_lightning.runs.summary import Summary, read_summary

SCORE_WINS = "val/score_win_rate"
KL = "val/kl_per_token"
COLUMNS = (
    "val/gold_win_rate",
    "val/score_win_rate",
    "val/accuracy",
    "val/loss",
    "val/score",
    "val/kl_per_token",
    "val/kl_per_response",
    "val/response_length",
    "val/distinct_2",
)
_MAX_PROMPTS = 6
_HEAD = 250  # characters with which each page of ours begins


# Settings that change no figure of a run: they do not name it.
_WITHOUT_EFFECT = ("callbacks.checkpoint.", "callbacks.samples.", "logger.", "resume", "ckpt_path")


@dataclass(frozen=True)
class Run:
    """One of several runs.

    Args:
        folder: folder of the run.
        label: what tells it from the others.
        summary: final summary of the run.
        rows: rows of metrics.csv.
        samples: samples of samples.jsonl.
        settings: dotted key -> value as text, of what differs between the runs.
    """

    folder: RunFolder
    label: str
    summary: Summary
    rows: Sequence[Mapping[str, float]]
    samples: Sequence[Mapping[str, Any]]
    settings: Mapping[str, str]

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """Final values."""
        return self.summary.metrics


def read_runs(folders: Sequence[RunFolder]) -> list[Run]:
    """Return the runs with what differs between them; labels are those settings where few do.

    Raises:
        FileNotFoundError: if a folder has no summary.
    """
    configs = [dict(flatten(_config(folder))) for folder in folders]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    values = {key: [show_setting(config.get(key, ABSENT)) for config in configs] for key in keys}
    different = {key: shown for key, shown in values.items() if len(set(shown)) > 1}
    runs = []
    for index, folder in enumerate(folders):
        settings = {key: shown[index] for key, shown in different.items()}
        runs.append(
            Run(
                folder,
                _label(folder, settings),
                read_summary(folder),
                read_metrics(folder.metrics),
                read_samples(folder.samples),
                settings,
            )
        )
    return runs


def write_comparison(folders: Sequence[RunFolder], path: Path) -> Path:
    """Write a page that compares runs, in one step, and return its path.

    Raises:
        FileNotFoundError: if a folder has no summary.
        FileExistsError: if the file is there already and is no such page.
        ValueError: for fewer than two runs.
    """
    page = render_comparison(folders)
    known = path.read_bytes()[:_HEAD] if path.is_file() else b""
    if os.path.lexists(path) and page[:_HEAD].encode() != known:
        raise FileExistsError(
            f"{path} is there already, and we have not written it: give another name with output="
        )
    write_text(path, page)
    return path


def render_comparison(folders: Sequence[RunFolder]) -> str:
    """Return the page as text; see `write_comparison`."""
    if len(folders) < 2:
        raise ValueError(f"{len(folders)} run given, at least two are needed to compare")
    runs = read_runs(folders)
    titles = {r.summary.title for r in runs}
    stages = ", ".join(sorted(titles))
    columns = [n for n in COLUMNS if any(run.metrics.get(n) is not None for run in runs)]
    logged = {name for run in runs for row in run.rows for name in row} - {ITERATION}
    first = looked_at_first(sorted(logged))
    rest = sorted(name for name in logged if name not in first and not name.startswith("time/"))
    curves, more = ([f for n in names if (f := _figure(runs, n))] for names in (first, rest))
    body = render(
        "comparison.html",
        runs=runs,
        stages=stages,
        unfinished=sum(run.summary.status != "completed" for run in runs),
        columns={name: quantity(name).label for name in columns},
        show=show,
        ends=ends,
        facts=about_all(runs),
        intervals=any(ends(run.metrics, name) for run in runs for name in columns),
        exported=next((run for run in runs if run.folder.export.is_dir()), None),
        paired=paired_with_first(runs),
        frontier=_frontier_chart(runs),
        curves=curves,
        more_curves=more,
        samples=_samples(runs),
    )
    title = f"{len(runs)} runs of {stages}"
    return str(render("page.html", title=title, body=body, footer="rlhf_lightning"))


def about_all(runs: Sequence[Run]) -> dict[str, str]:
    """Return from what, on what and against what, as far as all runs say the same."""
    about: dict[str, str] = dict(runs[0].summary.about)
    prompts = runs[0].metrics.get("val/num_prompts")
    if prompts is not None and all(r.metrics.get("val/num_prompts") == prompts for r in runs):
        about["measured on"] = counted(prompts, "held-out prompt")
    others = [run.summary.about for run in runs[1:]]
    return {k: v for k, v in about.items() if all(o.get(k, v) == v for o in others)}


def paired_with_first(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return of each later run how it differs from the first on the prompts of both.

    `num_prompts`, and `rows` of name, value, interval and whether that excludes no difference; no
    rows with fewer than 30 prompts. A run without responses by prompt is left out.
    """
    found, first = [], _values(runs[0])
    for run in runs[1:] if first else ():
        if not (values := _values(run)):
            continue
        count, differences = paired_differences(first, values, confidence=CONFIDENCE)
        rows = []
        for name, (value, low, high) in differences.items() if count >= FEW else ():
            key, is_rate = f"val/{name}", name.endswith("_win_rate")
            known = ends({f"{key}_low": low, f"{key}_high": high}, key)
            shown = low > 0.5 or high < 0.5 if is_rate else low > 0 or high < 0
            label = f"{quantity(key).label}, over the first" if is_rate else quantity(key).label
            rows.append((label, "+" * (value > 0 and not is_rate) + show(key, value), known, shown))
        found.append({"run": run, "num_prompts": count, "rows": rows})
    return found


def _values(run: Run) -> dict[str, Any]:
    """Return the values of the last comparison with a baseline; {} of a run that has none."""
    lines = [line for line in read_samples(run.folder.distributions) if "prompts" in line]
    return lines[-1] if lines else {}


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points that none beats in both: less KL and more wins, by rising KL."""
    kept: list[Point] = []
    for kl, rate in sorted(points, key=lambda p: (p[0], -p[1])):
        if not kept or rate > kept[-1][1]:
            kept.append((kl, rate))
    return kept


def _frontier_chart(runs: Sequence[Run]) -> list[Figure]:
    """Return win rate by the score over KL, a mark a run; none with fewer than two."""
    series = []
    for run in runs:
        kl, rate, low, high = (
            run.metrics.get(key) for key in (KL, SCORE_WINS, *bound_keys(SCORE_WINS))
        )
        points = [] if kl is None or rate is None else [(kl, rate)]
        bounds = [] if low is None or high is None else [(low, high)]
        series.append(Series(run.label, points, "marks", bounds))
    known = [point for one in series for point in one.points]
    if len(known) < 2:
        return []
    title, legends = "Win rate by the score over KL", [one.label for one in series]
    series.append(Series("frontier", frontier(known), "reference"))
    chart = line_chart(title, series, unit="share", whole=False)
    return [Figure(title, chart, legends=legends)]


def _figure(runs: Sequence[Run], name: str) -> Figure | None:
    kind = "marks" if name.startswith("val/") else "line"
    series = [
        Series(
            run.label,
            [(r[ITERATION], r[name]) for r in run.rows if math.isfinite(r.get(name, math.nan))],
            kind,
        )
        for run in runs
    ]
    about = quantity(name)
    chart = line_chart(about.label, series, unit=about.unit, band=about.healthy)
    return Figure(capitalized(about.label), chart, code=name) if chart else None


def _samples(runs: Sequence[Run]) -> str:
    answered: list[tuple[Run, dict[str, Any]]] = []
    for run in runs:
        held_out = [s for s in run.samples if s.get("baseline_response") is not None]
        last = max((s[ITERATION] for s in held_out), default=None)
        if held_out:  # a run that failed may have none
            answered.append((run, {s["prompt"]: s for s in held_out if s[ITERATION] == last}))
    first = answered[0][1] if answered else {}
    prompts = [p for p in first if all(p in other for _, other in answered[1:])]
    cards = [
        {
            "prompt": prompt,
            "answers": [
                (run.label, figures(by[prompt], ""), text(by[prompt].get("response", "")), "now")
                for run, by in answered
            ],
        }
        for prompt in prompts[:_MAX_PROMPTS]
    ]
    lead = "Held-out prompts that all runs answered, not selected."
    return render("samples.html", lead=lead, cards=cards, css="") if cards else ""


def _label(folder: RunFolder, settings: Mapping[str, str]) -> str:
    settings = {k: v for k, v in settings.items() if not k.startswith(_WITHOUT_EFFECT)}
    if 0 < len(settings) <= 3 and all(len(value) <= 24 for value in settings.values()):
        return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())
    parts = folder.path.resolve().parts
    return "/".join(parts[-2:]) if folder.name.isdigit() else folder.name


def _config(folder: RunFolder) -> dict[str, Any]:
    if not folder.config.is_file():
        return {}
    try:
        content = read_yaml(folder.config)
    except (OSError, ValueError):
        return {}
    return public_config(content, content) if isinstance(content, dict) else {}
