"""Curves of recorded runs, differences at equal KL with intervals, and pictures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from scipy import stats

from benchmarks.studies.ensembles.plan import ENSEMBLES, SINGLE

STEP = 0.25  # of sqrt(KL)
LEAST = 1.0  # below it no run has moved far enough to differ

Point = tuple[float, float, float]  # sqrt(KL), proxy, gold


def points(result: Mapping[str, Any]) -> list[Point]:
    """Return each iteration's sqrt(KL), proxy and gold.

    Both rewards are gains over the SFT policy in standard deviations of its answers. KL is the mean
    over answers, nats; the k1 estimate may be below 0 at the start, where it counts as 0.
    """
    sft = result["sft"]
    return [
        (
            math.sqrt(max(row["kl"], 0.0)),
            (row["proxy"] - sft["proxy_mean"]) / sft["proxy_std"],
            (row["gold"] - sft["gold_mean"]) / sft["gold_std"],
        )
        for row in result["curve"]
    ]


def binned(found: Sequence[Point]) -> dict[int, Point]:
    """Return the mean point of each bin of sqrt(KL), by its number."""
    bins: dict[int, list[Point]] = {}
    for point in found:
        bins.setdefault(int(point[0] / STEP), []).append(point)
    return {
        number: tuple(statistics.fmean(values) for values in zip(*inside, strict=True))  # type: ignore[misc]
        for number, inside in sorted(bins.items())
    }


def at_distance(found: Sequence[Point], distance: float) -> Point | None:
    """Return where a run first passed a sqrt(KL), interpolated; None if it never did."""
    for before, after in pairwise(found):
        if before[0] < distance <= after[0]:
            share = (distance - before[0]) / (after[0] - before[0])
            proxy, gold = (before[i] + share * (after[i] - before[i]) for i in (1, 2))
            return distance, proxy, gold
    return None


def common_distances(runs: Sequence[Sequence[Point]]) -> list[float]:
    """Return the distances from `LEAST` on, `STEP` apart, that every run has passed."""
    farthest = min(max(point[0] for point in run) for run in runs)
    steps = range(math.ceil(LEAST / STEP), math.floor(farthest / STEP) + 1)
    return [step * STEP for step in steps]


def mean_over(run: Sequence[Point], distances: Sequence[float]) -> tuple[float, float, float]:
    """Return mean proxy - gold, proxy and gold of a run that passed all these distances."""
    passed = [at_distance(run, distance) for distance in distances]
    proxy, gold = (statistics.fmean(p[axis] for p in passed if p is not None) for axis in (1, 2))
    return proxy - gold, proxy, gold


def t_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return Student's 95 % interval of the mean over pairs of runs.

    A bootstrap of so few pairs would be too narrow: of four that agree in sign it never meets 0.
    """
    mean, count = statistics.fmean(differences), len(differences)
    error = statistics.stdev(differences) / math.sqrt(count)
    reach = float(stats.t.ppf(0.975, count - 1)) * error
    return mean - reach, mean + reach


def ensemble_table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the differences in proxy - gold between ensembles and their single members."""
    by_name: dict[str, dict[int, list[Point]]] = {}
    for result in results:
        if result["condition"] in (SINGLE, *ENSEMBLES):
            by_name.setdefault(result["condition"], {})[result["seed"]] = points(result)
    if set(by_name) != {SINGLE, *ENSEMBLES}:
        return []
    seeds = sorted(set.intersection(*(set(runs) for runs in by_name.values())))
    if len(seeds) < 2:
        return []
    passed = common_distances([by_name[name][seed] for name in by_name for seed in seeds])
    if not passed:
        return [f"no sqrt(KL) from {LEAST:g} on that every run passed"]
    means = {n: {s: mean_over(by_name[n][s], passed) for s in seeds} for n in by_name}
    lines = [
        f"Runs of each: seeds {seeds}; {len(passed)} distances sqrt(KL) from {passed[0]:g} to "
        f"{passed[-1]:g} that every run passed.",
        "",
        "| paid by | proxy | gold | proxy - gold | less than single: proxy - gold | more than "
        "single: gold |",
        "|---|---|---|---|---|---|",
    ]
    for name in (SINGLE, *ENSEMBLES):
        gap, proxy, gold = (statistics.fmean(means[name][s][i] for s in seeds) for i in range(3))
        told = f"| {name} | {proxy:.2f} | {gold:.2f} | {gap:.2f} |"
        if name == SINGLE:
            lines.append(f"{told} | |")
            continue
        less = [means[SINGLE][s][0] - means[name][s][0] for s in seeds]
        more = [means[name][s][2] - means[SINGLE][s][2] for s in seeds]
        lines.append(f"{told} {with_interval(less)} | {with_interval(more)} |")
    return lines


def with_interval(differences: Sequence[float]) -> str:
    """Return a mean with its interval."""
    low, high = t_interval(differences)
    return f"{statistics.fmean(differences):.2f} ({low:.2f} to {high:.2f})"


def report(results: Sequence[Mapping[str, Any]], pictures: Path | None) -> str:
    """Return the tables as Markdown; write the pictures if a folder is given."""
    if pictures is not None:
        draw_ensembles(results, pictures / "ensembles.png")
    return "\n".join(ensemble_table(results))


def draw_ensembles(results: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Draw gold and proxy over sqrt(KL), a panel for the single models and for each ensemble."""
    figure, axes = _figure(1, 1 + len(ENSEMBLES), (12, 3.8))
    for axis, name in zip(axes[0], (SINGLE, *ENSEMBLES), strict=True):
        for result in results:
            if result["condition"] == name:
                _draw_run(axis, points(result))
        title = "one model, 500 pairs" if name == SINGLE else name.replace("_", " ")
        axis.set_title(title, fontsize=10)
    figure.savefig(out, dpi=110)


def _figure(rows: int, columns: int, size: tuple[float, float]) -> Any:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    figure.supxlabel("sqrt(KL from SFT), nats a response", fontsize=10)
    figure.supylabel("gain over SFT, its standard deviations", fontsize=10)
    for axis in axes.flat:
        axis.axhline(0, color="0.8", linewidth=0.8)
    return figure, axes


def _draw_run(axis: Any, found: Sequence[Point]) -> None:
    line = list(binned(found).values())
    for number, colour, label in ((1, "C1", "proxy: the reward model"), (2, "C0", "gold")):
        axis.plot(
            [p[0] for p in found], [p[number] for p in found], ".", ms=2, color=colour, alpha=0.4
        )
        axis.plot([p[0] for p in line], [p[number] for p in line], color=colour, label=label)
