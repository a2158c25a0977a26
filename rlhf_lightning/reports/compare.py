"""`comparison.html`: several runs on one page, for two runs as for the jobs of a sweep."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rlhf_lightning.reports.charts import (
    Figure,
    Point,
    Series,
    line_chart,
    looked_at_first,
    points_of,
    render,
)
from rlhf_lightning.reports.page import saved_config, saved_words
from rlhf_lightning.runs.folder import RunFolder, read_metrics, read_samples, write_text
from rlhf_lightning.runs.metric_catalog import bound_keys, capitalized, ends, quantity, show
from rlhf_lightning.runs.public_config import without_folders
from rlhf_lightning.runs.summary import Summary, read_summary
from rlhf_lightning.runs.verdict import FEW, verdict

COLUMNS = (
    *("val/num_prompts", "val/num_pair_prompts"),
    *("val/gold_win_rate", "val/score_win_rate", "val/accuracy", "val/loss", "val/score"),
    *("val/kl_per_token", "val/kl_per_response", "val/response_length", "val/distinct_2"),
)
# What these are is another thing for each objective.
_OF_A_STAGE = re.compile(r"/(loss|accuracy|margin|calibration_error|(chosen|rejected)_reward)$")
NUM_CURVES = 6
_MODELS = ("artifacts", "suffix", "apart")  # of `paths`: where the models of a run are
_LONGEST_LABEL = 80
_NOT_SET = ("", "not set")
_HEAD = 250  # characters with which each page of ours begins


@dataclass(frozen=True)
class Run:
    """One of several runs: its folder, what tells it from the others, its summary and settings.

    `settings` are those that differ between the runs, as text by dotted key, and `words` what their
    command lines have different.
    """

    folder: RunFolder
    label: str
    summary: Summary
    settings: Mapping[str, str]
    words: Mapping[str, str]


def read_runs(folders: Sequence[RunFolder]) -> list[Run]:
    """Return the runs with what differs between them; labels are those settings where few do.

    Raises:
        FileNotFoundError: if a folder has no summary.
    """
    summaries, configs = [read_summary(folder) for folder in folders], _told_apart(folders)
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = {key: [config.get(key, _NOT_SET) for config in configs] for key in keys}
    # Another text with one value is no difference, nor what one text makes of another setting.
    different = [
        k for k, row in rows.items() if all(len({*of}) > 1 for of in zip(*row, strict=True))
    ]
    settings = [{key: rows[key][n][1] for key in different} for n in range(len(folders))]
    typed = list(map(_words, folders, summaries))
    both = list(zip(typed, configs, strict=True))
    keys = dict.fromkeys(key for own in typed for key in own)
    told = {k: [own.get(k) or of.get(k, _NOT_SET)[1] for own, of in both] for k in keys}
    spelled = {key: row for key, row in told.items() if len({*row}) > 1}
    words = [{key: row[n] for key, row in spelled.items()} for n in range(len(folders))]
    paths = [folder.path.resolve() for folder in folders]
    labels = [path.relative_to(os.path.commonpath(paths)).as_posix() for path in paths]
    for of_runs in (words, settings):
        short = [_named(own.items()) for own in of_runs]  # one label would be one curve
        is_short = len(of_runs[0]) <= 3 and max(map(len, short)) <= _LONGEST_LABEL
        labels = short if is_short and len({*short}) == len(short) else labels
    return list(map(Run, folders, labels, summaries, settings, words))


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
        raise FileExistsError(f"{path} is there already: give another name with output=")
    write_text(path, page)
    return path


def render_comparison(folders: Sequence[RunFolder]) -> str:
    """Return the page as text; see `write_comparison`."""
    if len(folders) < 2:
        raise ValueError(f"{len(folders)} run given, at least two are needed to compare")
    runs = read_runs(folders)
    stages = ", ".join(dict.fromkeys(run.summary.title for run in runs))
    body = render(
        "comparison.html",
        runs=runs,
        stages=stages,
        results=[verdict(run.summary) for run in runs],
        columns=_columns(runs),
        show=show,
        ends=ends,
        paired=paired_with_first(runs),
        chart=_chart(runs),
        curves=curves_of(runs),
    )
    title = f"{len(runs)} runs of {stages}"
    return str(render("page.html", title=title, body=body, footer="rlhf_lightning"))


def _columns(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """Return name, title of the only stage, or "", and label of each figure that a run has."""
    found = []
    for name in COLUMNS:
        measured = [run.summary for run in runs if run.summary.metrics.get(name) is not None]
        titles = dict.fromkeys(_only_of(name, summary) for summary in measured)
        label = quantity(name).label.removeprefix("held-out ")
        found += [(name, t, f"{label}, {t}" if len(titles) > 1 else label) for t in titles]
    return found


def _only_of(name: str, summary: Summary) -> str:
    """Return the title of the runs that a metric may be compared with; "" of all."""
    return summary.title if _OF_A_STAGE.search(name) else ""


def paired_with_first(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return of each later run how it differs from the first on the prompts of both.

    `num_prompts`, and `rows` of name, value, interval and whether that excludes no difference; no
    rows with fewer than 30 prompts. A run without responses by prompt is left out.
    """
    from rlhf_lightning.evaluation.win_rate import paired_differences  # brings torch

    found, first = [], _values(runs[0])
    for run in runs[1:] if first else ():
        if not (values := _values(run)):
            continue
        count, differences = paired_differences(first, values)
        rows = []
        for name, (value, low, high) in differences.items() if count >= FEW else ():
            key, is_rate = f"val/{name}", name.endswith("_win_rate")
            known = ends({f"{key}_low": low, f"{key}_high": high}, key)
            shown = low > 0.5 or high < 0.5 if is_rate else low > 0 or high < 0
            label = quantity(key).label.removeprefix("held-out ") + ", over the first" * is_rate
            rows.append((label, "+" * (value > 0 and not is_rate) + show(key, value), known, shown))
        found.append({"run": run, "num_prompts": count, "rows": rows})
    return found


def _values(run: Run) -> dict[str, Any]:
    """Return the values of the last comparison with a baseline; {} of a run that has none."""
    lines = [line for line in read_samples(run.folder.distributions) if "prompts" in line]
    return lines[-1] if lines else {}


def _chart(runs: Sequence[Run]) -> Figure | None:
    """Return win rate by the score over KL, a mark a run; None with fewer than two."""
    wins, title, series = "val/score_win_rate", "Win rate by the score over KL", []
    for run in runs:
        names = ("val/kl_per_token", wins, *bound_keys(wins))
        x, y, low, high = (run.summary.metrics.get(name) for name in names)
        points = [] if x is None or y is None else [(x, y)]
        bounds = [] if low is None or high is None else [(low, high)]
        series.append(Series(run.label, points, "marks", bounds))
    if sum(bool(one.points) for one in series) < 2:
        return None
    axis = "KL from the baseline, nats a token"
    chart = line_chart(title, series, unit="share", axis=axis)
    return Figure(title, chart, legends=[one.label * bool(one.points) for one in series])


def curves_of(runs: Sequence[Run]) -> list[Figure]:
    """Return a chart of each metric that one looks at first.

    A line is a run, or the mean of runs that differ in the seed alone, in a band from the lowest of
    them to the highest at each iteration that all of them have. It has the colour of its first run.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        others = _named(item for item in run.settings.items() if item[0] != "seed")
        groups.setdefault(others if "seed" in run.settings else run.label, []).append(run)
    labels = {run.label: "" for run in runs}
    for others, group in groups.items():
        short = others if len(others) <= _LONGEST_LABEL else group[0].label
        several = f"{short or 'all runs'}, {len(group)} seeds"
        labels[group[0].label] = group[0].label if len(group) == 1 else several
    lines = {g[0].label: [read_metrics(run.folder.metrics) for run in g] for g in groups.values()}
    stages = {group[0].label: group[0].summary for group in groups.values()}
    own = []
    for key, of in stages.items():
        names = dict.fromkeys(name for rows in lines[key] for row in rows for name in row)
        own.append([(name, _only_of(name, of)) for name in looked_at_first(names)])
    found = []
    # Each stage has its turn.
    turns = dict.fromkeys(each for turn in zip_longest(*own) for each in turn if each)
    for name, title in [*turns][:NUM_CURVES]:
        shown = {k: lines[k] for k, of in stages.items() if title in ("", of.title)}
        series = [_line(k, [_points(rows, name) for rows in shown.get(k, ())]) for k in labels]
        about = quantity(name)
        if chart := line_chart(about.label, series, unit=about.unit, band=about.healthy):
            legends = [labels[one.label] if one.points else "" for one in series]
            found.append(Figure(capitalized(about.label), chart, code=name, legends=legends))
    return found


def _points(rows: Sequence[Mapping[str, float]], name: str) -> dict[float, float]:
    return {x: y for x, y in points_of(name, rows) if math.isfinite(y)}


def _line(label: str, runs: Sequence[Mapping[float, float]]) -> Series:
    shared = [x for x in (runs[0] if runs else ()) if all(x in points for points in runs)]
    values = [[points[x] for points in runs] for x in shared]
    means: list[Point] = [(x, sum(of) / len(of)) for x, of in zip(shared, values, strict=True)]
    return Series(label, means, bounds=[(min(of), max(of)) for of in values if len(of) > 1])


def _told_apart(folders: Sequence[RunFolder]) -> list[dict[str, tuple[str, str]]]:
    """Return the settings of each run by dotted key, as written and as shown.

    Of a folder only the last part is shown: several with the same one are numbered.
    """
    configs = [dict(_leaves(*_settings_of(folder))) for folder in folders]
    written: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for key, (own, text) in (item for config in configs for item in config.items()):
        if "${" not in own:
            written[key, text].setdefault(own, len(written[key, text]) + 1)
    for config in configs:
        for key, (own, text) in config.items():
            if len(numbers := written[key, text]) > 1 and own in numbers:
                config[key] = own, f"{text} ({numbers[own]})"
    return configs


def _settings_of(folder: RunFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration as written and as shown, with the places of the run's models."""
    own, shown = saved_config(folder, public=False), saved_config(folder)
    beside = f"{folder.path.resolve().parent}/"  # as each pipeline has its own
    paths = own.get("paths") or {}
    places = {key: str(paths[key]).replace(beside, "../") for key in _MODELS if paths.get(key)}
    names = {key: without_folders(place) for key, place in places.items()}
    return own | {"paths": places}, shown | {"paths": names}


def _words(folder: RunFolder, summary: Summary) -> dict[str, str]:
    """Return what a command line says by its keys, EXPERIMENT MODEL FILE included."""
    words = shlex.split(summary.about.get("command", ""))[1:] or saved_words(folder)
    plain = [word for word in words if "=" not in word and not word.startswith("--")]
    named = zip(("experiment", "model", "file", "reward"), plain, strict=False)
    return {**dict(named), **dict(w.lstrip("+").split("=", 1) for w in words if "=" in w)}


def _named(settings: Iterable[tuple[str, str]]) -> str:
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings)


def _leaves(own: Any, shown: Any, prefix: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the dotted key of each leaf of both with its texts; a list is one."""
    if isinstance(own, Mapping) and isinstance(shown, Mapping) and own:
        for key in (key for key in own if str(key) in shown):
            below = f"{prefix}.{key}" if prefix else str(key)
            yield from _leaves(own[key], shown[str(key)], below)
    else:
        texts = (v if isinstance(v, str) else json.dumps(v, default=str) for v in (own, shown))
        yield prefix, (next(texts), next(texts))
