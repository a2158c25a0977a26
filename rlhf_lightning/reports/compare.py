"""`comparison.html`: several runs on one page, for two runs as for the jobs of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_lightning.reports.charts import NUM_COLOURS, Series, line_chart
from rlhf_lightning.reports.choice import Choice, choose
from rlhf_lightning.reports.curves import FIRST
from rlhf_lightning.reports.frontier import frontier_chart, parallel_chart
from rlhf_lightning.reports.html import text
from rlhf_lightning.reports.page import document
from rlhf_lightning.reports.samples import answer, figures
from rlhf_lightning.reports.several import Run, read_runs
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import ITERATION, RunFolder
from rlhf_lightning.runs.metric_catalog import duration, quantity, show
from rlhf_lightning.runs.verdict import STAGES

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
_LONGEST_CAUSE = 240


def write_comparison(folders: Sequence[RunFolder], path: Path) -> Path:
    """Write a page that compares runs, in one step, and return its path.

    Raises:
        FileNotFoundError: if a folder has no summary.
        ValueError: for fewer than two runs.
    """
    write_text(path, render_comparison(folders))
    return path


def render_comparison(folders: Sequence[RunFolder]) -> str:
    """Return the page as text; see `write_comparison`."""
    if len(folders) < 2:
        raise ValueError(f"{len(folders)} run given, at least two are needed to compare")
    runs = read_runs(folders)
    choice = choose(runs)
    stages = sorted({STAGES.get(run.summary.stage, run.summary.stage) for run in runs})
    body = (
        _head(runs, choice, stages)
        + _table(runs, choice)
        + _frontier(runs)
        + _parallel(runs)
        + _differences(runs)
        + _curves(runs)
        + _samples(runs)
    )
    title = f"{len(runs)} runs of {', '.join(stages)}"
    return document(title, body, "rlhf_lightning")


def _head(runs: Sequence[Run], choice: Choice, stages: Sequence[str]) -> str:
    ended = sum(run.summary.status == "completed" for run in runs)
    left = "" if ended == len(runs) else f"<span>{len(runs) - ended} did not end</span>"
    result = '<h1 class="sentence">No setting is shown to be better than all others.</h1>'
    if choice.run is None:
        result = '<h1 class="sentence">No setting is recommended.</h1>'
    elif choice.caption:
        result = (
            f'<p class="figure small">{text(choice.run.label)}</p>'
            f'<p class="caption">{text(choice.caption)}</p>'
        )
    return (
        f'<header><div class="overline"><strong>{text(", ".join(stages))}</strong>'
        f"<span>{len(runs)} runs</span>{left}</div>"
        f'<div class="hero">{result}<p class="sentence">{text(choice.reason)}</p></div></header>'
    )


def _table(runs: Sequence[Run], choice: Choice) -> str:
    names = [n for n in COLUMNS if any(run.metrics.get(n) is not None for run in runs)]
    head = "".join(f'<th class="num">{text(quantity(name).label)}</th>' for name in names)
    ahead = choice.run if choice.caption else None
    rows = "".join(
        f"<tr{' class=chosen' if run is ahead else ''}><td class='name'>{_name(runs, i)}"
        f"</td><td>{_ended(run)}</td>"
        + "".join(f'<td class="num">{_value(run, name)}</td>' for name in names)
        + f'<td class="num">{duration(run.summary.seconds.get("total", 0.0))}</td></tr>'
        for i, run in enumerate(runs)
    )
    return (
        '<section><h2>Runs</h2><div class="wide"><table><tr><th>run</th><th>ended</th>'
        f'{head}<th class="num">time</th></tr>{rows}</table></div></section>'
    )


def _ended(run: Run) -> str:
    cause = run.summary.cause
    why = f"<br><small>{text(cause[:_LONGEST_CAUSE])}</small>" if cause else ""
    return text(run.summary.status) + why


def _value(run: Run, name: str) -> str:
    value = run.metrics.get(name)
    if value is None:
        return ""
    low, high = (run.metrics.get(f"{name}{bound}") for bound in ("_low", "_high"))
    interval = ""
    if low is not None and high is not None:
        interval = f"<br><small>{100 * low:.0f} to {100 * high:.0f} %</small>"
    return text(show(name, value)) + interval


def _name(runs: Sequence[Run], index: int) -> str:
    return f'<span class="s{index % NUM_COLOURS}t">●</span> {text(runs[index].label)}'


def _frontier(runs: Sequence[Run]) -> str:
    charts = ""
    for name in ("val/score_win_rate", "val/gold_win_rate"):
        if chart := frontier_chart(runs, name):
            label = quantity(name).label
            charts += f"<figure><figcaption><b>{text(label)}</b></figcaption>{chart}</figure>"
    if not charts:
        return ""
    return (
        '<section><h2>Win rate against KL</h2><p class="lead">Up and left is better. The line '
        "joins the runs that no other beats in both. The gold reward is shown to check the learnt "
        f'score; no setting is chosen by it.</p><div class="charts two">{charts}</div></section>'
    )


def _parallel(runs: Sequence[Run]) -> str:
    chart = parallel_chart(runs)
    if not chart:
        return ""
    return (
        '<section><h2>Settings and outcomes</h2><p class="lead">A line a run: at the left what was '
        f'set, at the right what came out.</p><div class="wide">{chart}</div></section>'
    )


def _differences(runs: Sequence[Run]) -> str:
    keys = list(runs[0].settings)
    if not keys:
        return (
            '<section><h2>What differs</h2><p class="lead">Nothing in the configurations.</p>'
            "</section>"
        )
    head = "".join(f"<th>{_name(runs, i)}</th>" for i in range(len(runs)))
    rows = "".join(
        f'<tr><td class="name"><code>{text(key)}</code></td>'
        + "".join(f"<td>{text(run.settings[key])}</td>" for run in runs)
        + "</tr>"
        for key in keys
    )
    return (
        f'<section><h2>What differs</h2><div class="wide"><table><tr><th>setting</th>{head}</tr>'
        f"{rows}</table></div></section>"
    )


def _curves(runs: Sequence[Run]) -> str:
    logged = {name for run in runs for row in run.rows for name in row} - {ITERATION}
    first = [name for name in FIRST if name in logged]
    rest = sorted(name for name in logged if name not in first and not name.startswith("time/"))
    shown = "".join(_figure(runs, name) for name in first)
    if not shown:
        return ""
    hidden = "".join(_figure(runs, name) for name in rest)
    if hidden:
        hidden = (
            f'<details><summary>{len(rest)} more curves</summary><div class="charts">{hidden}</div>'
            "</details>"
        )
    key = " ".join(f'<span class="legend">{_name(runs, i)}</span>' for i in range(len(runs)))
    return (
        f'<section><h2>Curves</h2><p class="lead">{key}</p>'
        f'<div class="charts">{shown}</div>{hidden}</section>'
    )


def _figure(runs: Sequence[Run], name: str) -> str:
    series = [
        Series(
            run.label,
            [
                (row[ITERATION], row[name])
                for row in run.rows
                if math.isfinite(row.get(name, math.nan))
            ],
            "marks" if name.startswith("val/") else "line",
        )
        for run in runs
    ]
    about = quantity(name)
    chart = line_chart(about.label, series, unit=about.unit, band=about.healthy)
    if not chart:
        return ""
    return (
        f"<figure><figcaption><b>{text(about.label[:1].upper() + about.label[1:])}</b>"
        f'<span class="key"><code>{text(name)}</code></span></figcaption>{chart}</figure>'
    )


def _samples(runs: Sequence[Run]) -> str:
    answered: list[tuple[Run, dict[str, Any]]] = []
    for run in runs:
        held_out = [s for s in run.samples if s.get("baseline_response") is not None]
        last = max((s[ITERATION] for s in held_out), default=None)
        if held_out:  # a run that failed may have none
            answered.append((run, {s["prompt"]: s for s in held_out if s[ITERATION] == last}))
    first = answered[0][1] if answered else {}
    prompts = [p for p in first if all(p in other for _, other in answered[1:])]
    cards = "".join(
        f'<article class="sample"><p class="prompt free" dir="auto">{text(prompt)}</p>'
        '<div class="pair">'
        + "".join(
            answer(run.label, figures(by[prompt], ""), text(by[prompt].get("response", "")), " now")
            for run, by in answered
        )
        + "</div></article>"
        for prompt in prompts[:_MAX_PROMPTS]
    )
    if not cards:
        return ""
    return (
        '<section><h2>Samples</h2><p class="lead">Held-out prompts that all runs answered, not '
        f'selected.</p><div class="samples">{cards}</div></section>'
    )
