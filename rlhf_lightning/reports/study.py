"""The page of a study: what was measured on its runs, gain against KL, and equal budgets.

The same tables are written as `study.html` and as `study.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from rlhf_lightning.evaluation.trade_off import (
    Estimate,
    Measured,
    common_range,
    difference,
    gain_at,
    mean_gain,
    over_seeds,
    prompt_error,
)
from rlhf_lightning.evaluation.win_rate import CONFIDENCE
from rlhf_lightning.reports.charts import Figure, Series, line_chart
from rlhf_lightning.reports.compare import KL
from rlhf_lightning.reports.html import render
from rlhf_lightning.reports.overoptimization import overoptimization
from rlhf_lightning.reports.study_results import Result, Study, Table, Values, by
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import ITERATION
from rlhf_lightning.runs.metric_catalog import (
    bound_keys,
    capitalized,
    duration,
    number,
    quantity,
)

GAIN = "val/gold_win_rate"
UNDECIDED = "The evidence does not separate the objectives."


def write_study(study: Study, folder: Path) -> tuple[Path, Path]:
    """Write `study.html` and `study.md` and return their paths."""
    runs = {result.run for result in study.results}
    compared, verdicts = compared_table(study)
    lead = "Where the right column says something else, figures differ for that reason too."
    protocol = Table("Protocol", lead, ["published", "here"], [*study.protocol.items()])
    tables = [published_table(study), protocol]
    told, law_tables, charts = overoptimization(study.results, study.reward_models)
    verdicts = [*told, *(verdicts if compared.rows or not told else [])]
    tables += [*law_tables, settings_table(study), curves_table(study), compared]
    tables.append(budget_table(study))
    shown = [table for table in tables if table.rows]
    failed = {r.run: r for r in study.results if not r.completed}
    missing = [replace(r, setting=setting) for (_, setting, _), r in failed.items()]
    head = f"{len(runs) - len(missing)} of {len(runs)} runs have ended."
    if missing:
        head += " Next: call the study again, which runs the others."
    elif UNDECIDED in verdicts:
        head += " Next: more seeds (seeds=[1, 2, 3, 4]) narrow the intervals."
    elif verdicts and not told and not compared.rows:
        head += " Next: choose settings (vary) with which the rows reach the same KL."
    body = render(
        "study.html",
        study=study,
        head=head,
        verdicts=verdicts,
        missing=missing,
        tables=shown,
        charts=charts if charts[1] else _charts(study),
        about=about_table(study),
    )
    page, text = folder / "study.html", folder / "study.md"
    title = f"study {study.name}"
    write_text(page, str(render("page.html", title=title, body=body, footer="rlhf_lightning")))
    lines = [f"# {capitalized(title)}", "", *filter(None, [study.about]), head, *verdicts, ""]
    lines += [f"- {r.name}: {r.status}{f', {r.cause}' if r.cause else ''}" for r in missing]
    tables = [about_table(study), *shown]
    write_text(text, "\n".join([*lines, "", *(table.markdown() for table in tables)]))
    return page, text


def about_table(study: Study) -> Table:
    """Return from what, on what and against what each row was run, as its first run says."""
    rows = by(study.results, lambda r: r.row)
    about = {row: next((r.about for r in of if r.about), {}) for row, of in rows.items()}
    keys = list(dict.fromkeys(key for told in about.values() for key in told))
    cells = []
    for row, told in about.items():
        settings, seeds = (len({getattr(r, of) for r in rows[row]}) for of in ("setting", "seed"))
        counts = f"{settings} with {seeds} seed{'s' * (seeds != 1)}"
        cells.append([row, counts, *(told.get(key, "") for key in keys)])
    return Table("What was run", "By the first run of each row.", ["row", "settings", *keys], cells)


def published_table(study: Study) -> Table:
    """Return what others report of a row beside its own mean, over settings where it has several.

    The interval is Student's over settings, such as data sets of which each is held out once; of a
    row with one setting it is that of its mean over seeds.
    """
    rows = []
    for row, results in by(study.results, lambda r: r.row).items():
        groups = [[r for r in group if r.completed] for group in _settings(results)]
        for metric, theirs in study.published.get(row, {}).items():
            show = quantity(metric).show
            means = [mean for group in groups if (mean := _mean(study, group, metric))]
            cells = ["not run", ""]
            if means:
                whole = means[0]
                if len(groups) > 1:
                    values = [Measured(0.0, mean.value) for mean in means]
                    whole = over_seeds(values, same_prompts=False)
                ours, _, interval = shown(metric, whole).partition(" (")
                count = sum(mean.num_seeds for mean in means)
                ours += _part(count, sum(map(len, groups)), len(results), "runs")
                cells = [ours, interval.removesuffix(")")]
            ended_of = f"{sum(map(len, groups))} of {len(results)}"
            rows.append([row, quantity(metric).label, show(theirs), *cells, ended_of])
    ended = [r for r in study.results if r.completed]
    lead = f"Published: {study.source}"
    if study.expected:
        lead += f" Expected of a run: {study.expected}."
    if ended:
        lead += (
            f" Found: at most {duration(max(r.seconds for r in ended))}, "
            f"{duration(max(r.cpu_seconds for r in ended))} of processor time and "
            f"{max(r.peak_mib for r in ended):.0f} MiB of resident memory a run."
        )
    header = ["row", "metric", "published", "ours", "95 % interval", "runs that ended"]
    return Table("Published and ours", lead, header, rows)


def settings_table(study: Study) -> Table:
    """Return final values by row and setting: means over the seeds that ended, with intervals."""
    columns = [n for n in study.measure if any(r.metrics.get(n) is not None for r in study.results)]
    rows = []
    for group in _settings(study.results):
        ended = [r for r in group if r.completed]
        means = {name: _mean(study, ended, name) for name in columns}
        cells = [
            shown(n, e) + _part(e.num_seeds, len(ended), len(group)) if e else ""
            for n, e in means.items()
        ]
        whole = "" if all(r.times_are_whole for r in ended) else "at least "
        cost = ["", "", "", ""]
        if ended:
            cost = [
                f"{fmean(_sampled(r) for r in ended):.0f}",
                whole + duration(fmean(r.seconds for r in ended)),
                whole + duration(fmean(r.cpu_seconds for r in ended)),
                f"{max(r.peak_mib for r in ended):.0f}",
            ]
        about = [group[0].row, group[0].setting, f"{len(ended)} of {len(group)}"]
        rows.append([*about, *cells, *cost])
    labels = [quantity(name).heading for name in columns]
    header = ["row", "setting", "seeds that ended", *labels]
    header += ["responses sampled", "time", "processor time", "peak memory, MiB"]
    lead = f"Means over seeds that ended, with 95 % intervals. {interval_note(study)}"
    lead += _bound_note(study) if KL in columns else ""
    return Table("Settings", lead, header, rows)


def interval_note(study: Study) -> str:
    """Return in words what the intervals hold for."""
    if len({r.seed for r in study.results}) < 2:
        return (
            "One seed: intervals hold for new prompts at the KL that was measured; seeds are not "
            "covered."
        )
    if study.same_prompts:
        return (
            "All seeds share their prompts: intervals hold for new prompts and new seeds; a figure "
            "whose spread over prompts was not measured has none."
        )
    return "Each seed has its own prompts, so the intervals, Student's over seeds, count both."


def curves_table(study: Study) -> Table:
    """Return the gain at each KL, and its mean over the KLs that all objectives reach."""
    curves = complete_curves(study)
    low_high = common_range([c for seeds in curves.values() for c in seeds.values()])
    header = ["row", *(f"KL {kl:g}" for kl in study.at_kl)]
    if low_high is not None:
        header.append(f"mean from KL {number(low_high[0])} to {number(low_high[1])}")
    rows = []
    for row, seeds in curves.items():
        found = [[gain_at(curve, kl) for curve in seeds.values()] for kl in study.at_kl]
        if low_high is not None:
            found.append([mean_gain(curve, *low_high) for curve in seeds.values()])
        rows.append([row, *(_reached(study, values) for values in found)])
    left_out = [row for row in by(study.results, lambda r: r.row) if row not in curves]
    lead = "Between the settings of a row, joined by straight lines; nothing is extrapolated."
    lead += _bound_note(study)
    if low_high is None:
        lead += " There is no range of KL that all rows reach."
    if left_out:
        lead += f" Without: {', '.join(left_out)} (a run is missing, or there is one setting)."
    return Table("Gold win rate at equal KL", lead, header, rows)


def compared_table(study: Study) -> tuple[Table, list[str]]:
    """Return the differences from the first row at equal KL, and what they show in sentences."""
    curves = {k: v for k, v in complete_curves(study).items() if k not in study.starts}
    first = next((r.row for r in study.results if r.row not in study.starts), "")
    theirs = curves.pop(first, {})
    compared = _comparisons(study, curves, theirs)
    rows: list[list[str]] = []
    shows: dict[str, list[str]] = {}
    count = len(compared)
    for row, where, known in compared:
        found = over_seeds(known, same_prompts=study.same_prompts)
        sure = over_seeds(
            known, same_prompts=study.same_prompts, confidence=1 - (1 - CONFIDENCE) / count
        )
        word = _word(study, sure, row, first)
        rows.append([f"{row} - {first}", where, _points(found), word])
        if word in ("better", "worse"):
            shows.setdefault(f"{row} is {word} than {first}", []).append(where)
    only = "" if len({r.seed for r in study.results}) > 1 else ", in the one seed that was run"
    verdicts = [f"{what} {', '.join(wheres)}{only}." for what, wheres in shows.items()]
    if not verdicts and curves:
        verdicts = [UNDECIDED]
        if not count:
            why = f"no KL is reached by {first} and another row in all seeds"
            why = why if theirs else f"{first} has no curve"
            verdicts = [f"Nothing is compared with {first}: {why}."]
    others = {r.row for r in study.results} - {first, *study.starts}
    if theirs and others and not curves and all(r.completed for r in study.results):
        verdicts = [f"Nothing is compared with {first}: no other row has a curve of its settings."]
    lead = (
        f"Intervals are 95 %. Better or worse only where the interval of {count} comparisons, at "
        f"1 - 0.05 / {count} (Bonferroni), excludes 0. {interval_note(study)}{_bound_note(study)}"
    )
    return Table("Differences", lead, ["rows", "where", "difference, points", "so"], rows), verdicts


def _comparisons(
    study: Study,
    curves: Mapping[str, Mapping[int, Sequence[Measured]]],
    theirs: Mapping[int, Sequence[Measured]],
) -> list[tuple[str, str, list[Measured]]]:
    """Return row, place and each seed's difference of what all seeds reach."""
    compared: list[tuple[str, str, list[Measured]]] = []
    for row, ours in curves.items() if theirs else ():
        reach = common_range([*ours.values(), *theirs.values()])
        places: dict[str, list[Measured | None]] = {}
        for kl in study.at_kl:
            places[f"at KL {kl:g}"] = _differences(ours, theirs, partial(gain_at, kl=kl))
        if reach is not None:
            where = f"on average from KL {number(reach[0])} to {number(reach[1])}"
            places[where] = _differences(
                ours, theirs, partial(mean_gain, low=reach[0], high=reach[1])
            )
        for where, values in places.items():
            known = [value for value in values if value is not None]
            if len(known) == len(values):
                compared.append((row, where, known))
    return compared


def complete_curves(study: Study) -> dict[str, dict[int, list[Measured]]]:
    """Return the settings of each seed by row; rows with a missing run or one setting are left out.

    A mean over what happened to end would favour a row whose bad runs failed.
    """
    curves = {}
    for row, results in by(study.results, lambda r: r.row).items():
        found = [(r.seed, measured(r.metrics)) for r in results]
        seeds: dict[int, list[Measured]] = {}
        for seed, point in found:
            seeds.setdefault(seed, []).extend([] if point is None else [point])
        if all(point is not None for _, point in found) and len(found) > len(seeds):
            curves[row] = seeds
    return curves


def measured(values: Values) -> Measured | None:
    """Return KL and gain of a run, None where one is missing."""
    kl, gain = values.get(KL), values.get(GAIN)
    return None if kl is None or gain is None else Measured(kl, gain, _error(values, GAIN))


def budget_table(study: Study) -> Table:
    """Return each setting where it had sampled what the cheapest training run sampled in all."""
    # An evaluation has no course, and a model that others start from sets no limit: both are in the
    # table of settings alone.
    compared = [r for r in study.results if r.completed and r.rows and r.row not in study.starts]
    limit = min((total for r in compared if (total := _sampled(r)) > 0), default=0.0)
    rows = []
    for group in _settings(study.results):
        found = [_at(r, limit) for r in group if r in compared]
        points = [point for point, _ in found if point is not None]
        if points and limit:
            gain = over_seeds(points, same_prompts=study.same_prompts)
            kl = number(fmean(point.kl for point in points))
            where = ", ".join(dict.fromkeys(where for _, where in found))
            about = [group[0].row, group[0].setting, f"{len(found)} of {len(group)}"]
            cell = shown(GAIN, gain) + _part(gain.num_seeds, len(found), len(group))
            rows.append([*about, cell, kl, where])
    lead = (
        f"Each run where it had sampled {limit:,.0f} responses, the total of the cheapest run: "
        "its last measurement of gold up to there. A run without one is shown at its end, with how "
        "much more it sampled."
    )
    if any("rollout/resampling_rounds" in r.rows[-1] for r in compared):
        lead += (
            " Prompts that were asked in place of others (`max_resampling_rounds`) are not counted."
        )
    header = ["row", "setting", "seeds that ended"]
    header += [quantity(name).heading for name in (GAIN, KL)]
    return Table("Equal responses sampled", lead, [*header, "measured at"], rows)


def _at(result: Result, limit: float) -> tuple[Measured | None, str]:
    total = _sampled(result)
    if total > limit:
        for row in reversed(result.rows):
            sampled = row[ITERATION] * result.answers
            if sampled <= limit and (point := measured(row)) is not None:
                return point, f"iteration {row[ITERATION]:.0f}"
        return measured(result.metrics), f"end, {total / limit:.1f} times as much"
    return measured(result.metrics), "end"


def shown(name: str, found: Estimate) -> str:
    """Return a mean as text, with its interval in brackets where it has one."""
    about, low, high = quantity(name), found.low, found.high
    show, unit = about.show, " points" if about.unit == "points" else ""
    if not math.isfinite(low):
        return show(found.value) + unit
    if about.unit == "share":
        low, high = _within(low), _within(high)
    return f"{show(found.value)} ({show(low).removesuffix(' %')} to {show(high)}){unit}"


def _within(bound: float) -> float:
    """Return a bound of a share, which no share lies beyond; NaN stays."""
    return bound if math.isnan(bound) else min(max(bound, 0.0), 1.0)


def _points(found: Estimate) -> str:
    ends = "" if math.isnan(found.low) else f" ({100 * found.low:+.1f} to {100 * found.high:+.1f})"
    return f"{100 * found.value:+.1f}{ends}"


def _word(study: Study, found: Estimate, row: str, first: str) -> str:
    """Return what a difference shows. A row whose KL is a bound is nowhere shown to be worse."""
    if not found.excludes_zero:
        return "not separated"
    behind = row if found.value < 0 else first
    if behind in study.bounded:
        return f"not separated (KL of {behind} is a bound)"
    return "better" if found.value > 0 else "worse"


def _bound_note(study: Study) -> str:
    if not study.bounded:
        return ""
    return (
        f" KL of {', '.join(study.bounded)} is an upper bound, log n - (n - 1) / n over the "
        "response length: at equal KL its gain may be higher than it says here, not lower."
    )


def _reached(study: Study, values: Sequence[Measured | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"reached by {len(known)} of {len(values)} seeds" if known else "not reached"
    return shown(GAIN, over_seeds(known, same_prompts=study.same_prompts))


def _differences(
    ours: Mapping[int, Sequence[Measured]],
    theirs: Mapping[int, Sequence[Measured]],
    gain: Callable[[Sequence[Measured]], Measured | None],
) -> list[Measured | None]:
    """Return the difference of each seed, None where one of both does not reach it."""
    pairs = [(gain(ours[seed]), gain(theirs[seed])) for seed in ours]
    return [None if a is None or b is None else difference(a, b) for a, b in pairs]


def _settings(results: Sequence[Result]) -> list[list[Result]]:
    return list(by(results, lambda r: f"{r.row} {r.setting}").values())


def _mean(study: Study, ended: Sequence[Result], name: str) -> Estimate | None:
    """Return the mean over runs; of one run with its own interval, which need not be symmetric."""
    runs = [r.metrics for r in ended if r.metrics.get(name) is not None]
    if len(runs) == 1:
        value, low, high = (runs[0].get(key) for key in (name, *bound_keys(name)))
        if value is not None and low is not None and high is not None:
            return Estimate(value, low, high, 1)
    found = [
        Measured(0.0, value, _error(metrics, name))
        for metrics in runs
        if (value := metrics.get(name)) is not None
    ]
    return over_seeds(found, same_prompts=study.same_prompts) if found else None


def _part(measured: int, ended: int, planned: int, of: str = "seeds") -> str:
    """Return of how many runs a mean is, "" where all that ended measured it."""
    return "" if measured == ended else f" ({measured} of {planned} {of})"


def _error(values: Values, name: str) -> float:
    low, high = (values.get(key) for key in bound_keys(name))
    return 0.0 if low is None or high is None else prompt_error(low, high)


def _sampled(result: Result) -> float:
    return result.rows[-1][ITERATION] * result.answers if result.rows else 0.0


def _charts(study: Study) -> tuple[str, list[Figure]]:
    """Return gold win rate against KL, a line a row, and what is to know to read it."""
    series = []
    for row, results in by(study.results, lambda r: r.row).items():
        found = []
        for group in _settings(results):
            known = [p for r in group if (p := measured(r.metrics)) is not None]
            if known:
                mean = over_seeds(known, same_prompts=study.same_prompts)
                interval = _within(mean.low), _within(mean.high)
                found.append(((fmean(p.kl for p in known), mean.value), interval))
        points, bounds = ([part[i] for part in sorted(found)] for i in (0, 1))
        series.append(Series(row, points, "marks", bounds))
    lead = (
        "Up and left is better. A dot is a setting, its mean over the seeds that ended; the bar is "
        f"its 95 % interval.{_bound_note(study)}"
    )
    title = "Gold win rate over KL from SFT, nats a token"
    chart = line_chart(title, series, unit="share", whole=False)
    return lead, [Figure(title, chart, legends=[one.label for one in series])] if chart else []
