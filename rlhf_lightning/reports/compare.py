"""`comparison.html`: several runs on one page, for two runs as for the jobs of a sweep."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_lightning.reports.charts import Figure, Series, line_chart
from rlhf_lightning.reports.choice import choose
from rlhf_lightning.reports.curves import FIRST
from rlhf_lightning.reports.frontier import frontier_chart
from rlhf_lightning.reports.html import render, text
from rlhf_lightning.reports.samples import figures
from rlhf_lightning.reports.several import Run, read_runs
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import ITERATION, RunFolder
from rlhf_lightning.runs.metric_catalog import capitalized, quantity, show
from rlhf_lightning.runs.summary import run_title

COLUMNS = (
    "val/gold_win_rate",
    "val/score_win_rate",
    "val/accuracy",
    "val/loss",
    "val/score",
    "val/kl_per_token",
    "val/response_length",
    "val/distinct_2",
)
_MAX_PROMPTS = 6
_HEAD = 250  # characters with which each page of ours begins


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
    titles = {run_title(r.summary.stage, r.summary.about.get("objective")) for r in runs}
    stages = ", ".join(sorted(titles))
    columns = [n for n in COLUMNS if any(run.metrics.get(n) is not None for run in runs)]
    logged = {name for run in runs for row in run.rows for name in row} - {ITERATION}
    first = [name for name in FIRST if name in logged]
    rest = sorted(name for name in logged if name not in first and not name.startswith("time/"))
    curves, more = ([f for n in names if (f := _figure(runs, n))] for names in (first, rest))
    rates = ("val/score_win_rate", "val/gold_win_rate")
    body = render(
        "comparison.html",
        runs=runs,
        choice=choose(runs),
        stages=stages,
        unfinished=sum(run.summary.status != "completed" for run in runs),
        columns={quantity(n).label: [_value(run, n) for run in runs] for n in columns},
        frontiers=[
            Figure(quantity(name).label, chart)
            for name in rates
            if (chart := frontier_chart(runs, name))
        ],
        curves=curves,
        more_curves=more,
        samples=_samples(runs),
    )
    title = f"{len(runs)} runs of {stages}"
    return str(render("page.html", title=title, body=body, footer="rlhf_lightning"))


def _value(run: Run, name: str) -> tuple[str, str]:
    """Return a final value and its interval as text, "" where it was not measured."""
    value = run.metrics.get(name)
    if value is None:
        return "", ""
    low, high = (run.metrics.get(f"{name}{bound}") for bound in ("_low", "_high"))
    if low is None or high is None:
        return show(name, value), ""
    return show(name, value), f"{100 * low:.1f} to {100 * high:.1f} %"


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
