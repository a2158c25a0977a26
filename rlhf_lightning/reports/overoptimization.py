"""Tables and charts of a study of over-optimisation: gold over the root of KL, by reward model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from rlhf_lightning.evaluation.overoptimization import (
    Law,
    Point,
    Way,
    fit_law,
    left_out,
    over_sizes,
)
from rlhf_lightning.evaluation.trade_off import Measured, over_seeds
from rlhf_lightning.reports.charts import Figure, Series, line_chart
from rlhf_lightning.reports.study_results import Result, RewardModel, Table
from rlhf_lightning.runs.metric_catalog import number

GOOD_R2 = 0.95
NEAR = 0.15  # of a predicted peak
_MEASURED = ("kl_per_response", "gold", "score", "baseline_gold", "baseline_score")
_STEP = 0.5  # of the distance, between the dots of a chart


@dataclass(frozen=True)
class Pursuit:
    """One seed's way from the SFT policy along a reward model.

    Args:
        row, setting, seed: its place in the study; of the best of n the setting is "".
        model: reward model that it followed.
        way: way of optimisation.
        gold: gained over the SFT policy, by distance.
        proxy: the reward model's score, likewise.
    """

    row: str
    setting: str
    seed: int
    model: RewardModel
    way: Way
    gold: Sequence[Point]
    proxy: Sequence[Point]

    @property
    def law(self) -> Law:
        """The fit to its gold."""
        return fit_law(self.way, self.gold)


def pursuits(results: Sequence[Result], models: Mapping[str, RewardModel]) -> list[Pursuit]:
    """Return the runs that ended and have three distances or more, row by row."""
    found: dict[tuple[str, str, int], Pursuit] = {}
    for result in results:
        if result.row not in models or not result.completed:
            continue
        gold, proxy = _points(result.rows or [result.metrics])
        key = result.run
        if (before := found.get(key)) is not None:  # of another n
            gold, proxy = [*before.gold, *gold], [*before.proxy, *proxy]
        way: Way = "rl" if result.rows else "best_of_n"
        found[key] = Pursuit(*key, models[result.row], way, gold, proxy)
    order: dict[tuple[str, str], int] = {}
    for row, setting, _ in found:
        order.setdefault((row, setting), len(order))
    kept = [one for one in found.values() if sum(point.distance > 0 for point in one.gold) >= 3]
    return sorted(kept, key=lambda one: (order[one.row, one.setting], one.seed))


def _points(rows: Sequence[Mapping[str, float | None]]) -> tuple[list[Point], list[Point]]:
    """Return what gold and score have gained.

    A first measurement at KL 0 is of the SFT policy with the noise of all others: their origin.
    """
    origin: tuple[float, float] | None = None
    gold: list[Point] = []
    proxy: list[Point] = []
    for row in rows:
        values = [row.get(f"val/{name}") for name in _MEASURED]
        kl, mine, score, *start = (math.nan if value is None else value for value in values)
        if any(math.isnan(value) for value in (kl, mine, score, *(origin or start))):
            continue
        if kl == 0 and origin is None and not gold:
            origin = mine, score
        begin = origin or start
        distance = math.sqrt(max(kl, 0.0))  # the estimate may be below 0 at the start
        gold.append(Point(distance, mine - begin[0]))
        proxy.append(Point(distance, score - begin[1]))
    return gold, proxy


def overoptimization(
    results: Sequence[Result], models: Mapping[str, RewardModel]
) -> tuple[list[str], list[Table], tuple[str, list[Figure]]]:
    """Return sentences, tables, and charts with their lead; none where no row names a model."""
    planned = {r.run for r in results if r.row in models}
    if not planned:
        return [], [], ("", [])
    found = pursuits(results, models)
    fitted = {(one.row, one.setting, one.seed) for one in found}
    good = sum(one.law.r2 >= GOOD_R2 for one in found)
    told = [
        f"The law explains at least 95 % of the variance of gold in {good} of {len(planned)} runs."
    ]
    if missing := sorted(planned - fitted):
        names = ", ".join(" ".join(filter(None, (r, s, f"seed {n}"))) for r, s, n in missing)
        told.append(
            "Without a fit, for they did not end or measured gold at fewer than three distances: "
            f"{names}."
        )
    if not found:
        return told, [], ("", [])
    sizes, errors = left_out_table(found)
    if errors:
        near = sum(error <= NEAR for error in errors)
        told.append(
            f"{near} of {len(errors)} peaks of a size left out are predicted within 15 % of their "
            "height."
        )
    seeds = len({seed for *_, seed in planned})
    return told, [laws_table(found, seeds), slopes_table(found), sizes], _charts(found)


def _estimate(values: Sequence[float]) -> str:
    """Return a mean with Student's interval over seeds."""
    found = over_seeds([Measured(0.0, value) for value in values], same_prompts=False)
    ends = "" if math.isnan(found.low) else f" ({number(found.low)} to {number(found.high)})"
    return f"{number(found.value)}{ends}"


def _mean_law(found: Sequence[Pursuit]) -> Law:
    laws = [one.law for one in found]
    return Law(laws[0].way, fmean(law.a for law in laws), fmean(law.b for law in laws))


def _within_reach(peak: Point | None, found: Sequence[Pursuit]) -> Point | None:
    """Return a peak that lies between the distances that were measured, on average; else None."""
    nearest = fmean(min(p.distance for p in one.gold if p.distance > 0) for one in found)
    farthest = fmean(max(one.gold).distance for one in found)
    return peak if peak is not None and nearest <= peak.distance <= farthest else None


def laws_table(found: Sequence[Pursuit], num_seeds: int) -> Table:
    """Return the coefficients, the fit, the peak and the end of each row and setting.

    Args:
        found: the runs.
        num_seeds: that were planned.
    """
    rows = []
    for (row, setting), same in groupby(found, key=lambda one: (one.row, one.setting)):
        seeds = list(same)
        laws = [one.law for one in seeds]
        peak, model = _within_reach(_mean_law(seeds).peak, seeds), seeds[0].model
        far = [max(one.gold) for one in seeds]
        rows.append(
            [
                " ".join(filter(None, [row, setting])),
                f"{model.parameters:,}",
                f"{model.pairs:,}",
                _estimate([law.a for law in laws]),
                _estimate([law.b for law in laws]),
                number(min(law.r2 for law in laws)),
                "not reached" if peak is None else _peak(peak),
                number(fmean(point.distance for point in far)),
                number(fmean(max(one.proxy).gain for one in seeds)),
                number(fmean(point.gain for point in far)),
                f"{len(seeds)} of {num_seeds}",
            ]
        )
    header = ["row", "parameters", "pairs", "a", "b", "least R2 of a seed", "peak of gold"]
    header += ["farthest sqrt(KL)", "score there", "gold there", "seeds"]
    lead = (
        "Gold gained over the SFT policy is fitted by d (a - b log d), of the best of n by "
        "d (a - b d), d = sqrt(KL), nats a response. a and b are means over seeds with Student's "
        "95 % interval; the peak is that of their means, where runs have gone as far. The KL of "
        "the best of n is its upper bound, log n - (n - 1) / n."
    )
    return Table("The law of over-optimisation", lead, header, rows)


def _families(found: Sequence[Pursuit]) -> dict[str, dict[int, list[Pursuit]]]:
    """Return the runs that differ in the size of the reward model alone, by its parameters."""
    families: dict[str, dict[int, list[Pursuit]]] = {}
    for one in found:
        group = [one.model.group, f"{one.model.pairs:,} pairs", one.setting]
        name = ", ".join(filter(None, group))
        families.setdefault(name, {}).setdefault(one.model.parameters, []).append(one)
    return {name: sizes for name, sizes in families.items() if len(sizes) >= 3}


def slopes_table(found: Sequence[Pursuit]) -> Table:
    """Return how the coefficients move with the logarithm of the size."""
    rows = []
    for name, sizes in _families(found).items():
        seeds = sorted(set.intersection(*({one.seed for one in same} for same in sizes.values())))
        laws = {
            seed: {
                size: one.law for size, same in sizes.items() for one in same if one.seed == seed
            }
            for seed in seeds
        }
        cells = [
            _estimate([over_sizes(_values(of_seed, key)).per_decade for of_seed in laws.values()])
            for key in ("a", "b")
            if seeds
        ]
        rows.append([name, str(len(sizes)), *(cells or ["", ""]), str(len(seeds))])
    header = ["runs", "sizes", "a, of ten times the size", "b, of ten times the size", "seeds"]
    lead = "Least squares over log10 of the parameters, seed by seed; Student's 95 % interval."
    return Table("Coefficients and size", lead, header, rows)


def _values(laws: Mapping[int, Law], key: str) -> dict[int, float]:
    return {size: getattr(law, key) for size, law in laws.items()}


def left_out_table(found: Sequence[Pursuit]) -> tuple[Table, list[float]]:
    """Return the peak of each size as the others predict it, and how far gold there is off."""
    rows, errors = [], []
    for name, sizes in _families(found).items():
        laws = {size: [one.law for one in same] for size, same in sizes.items()}
        for size, same in sizes.items():
            own = _within_reach(_mean_law(same).peak, same)
            predicted = _within_reach(left_out(laws, size).peak, same)
            if own is None and predicted is None:
                continue
            cells = ["not reached" if peak is None else _peak(peak) for peak in (own, predicted)]
            error = ""
            errors.append(math.inf)
            if own is not None and predicted is not None:
                errors[-1] = abs(predicted.gain / own.gain - 1)
                where = predicted.distance / own.distance - 1
                error = f"{100 * (predicted.gain / own.gain - 1):+.0f} %; {100 * where:+.0f} %"
            rows.append([name, f"{size:,}", *cells, error])
    header = [
        "runs",
        "size left out",
        "its peak of gold",
        "predicted",
        "error in gold; in distance",
    ]
    lead = (
        "a and b of each size from the lines through those of all others. Sizes without a peak "
        "within the distances that were measured, found or predicted, are left out."
    )
    return Table("A size left out", lead, header, rows), errors


def _peak(point: Point) -> str:
    return f"{number(point.gain)} at {number(point.distance)}"


def _charts(found: Sequence[Pursuit]) -> tuple[str, list[Figure]]:
    """Return a chart a family, a line a size of reward model, and what is to know to read them."""
    figures = []
    for name, sizes in _families(found).items():
        series = []
        for size, same in sorted(sizes.items()):
            points, bounds = _dots(same)
            series.append(Series(f"{size:,}", points, "marks", bounds))
        chart = line_chart(name, series, whole=False)
        if chart:
            title = f"Gold gained over sqrt(KL from SFT): {name}"
            figures.append(Figure(title, chart, legends=[one.label for one in series]))
    lead = (
        "A line a size of reward model, in parameters; KL in nats a response. A dot is the mean "
        "over all seeds of the line, of PPO of what was measured within "
        f"{_STEP:g} of distance; the bar is its 95 % interval. Where a seed has no measurement "
        "there is no dot."
    )
    if any(one.way == "best_of_n" for one in found):
        lead += " The KL of the best of n is its upper bound."
    return lead, figures


def _dots(found: Sequence[Pursuit]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return distance and mean gain, by distance, and the intervals of the gains."""
    bins: dict[float, dict[int, list[Point]]] = {}
    for one in found:
        for point in one.gold:
            of_all_seeds = one.way == "best_of_n"
            place = point.distance if of_all_seeds else point.distance // _STEP
            bins.setdefault(place, {}).setdefault(one.seed, []).append(point)
    dots = []
    seeds = {one.seed for one in found}
    for by_seed in bins.values():
        # A mean over those that reach it would jump where a seed ends.
        if by_seed.keys() != seeds:
            continue
        means = [fmean(point.gain for point in points) for points in by_seed.values()]
        mean = over_seeds([Measured(0.0, value) for value in means], same_prompts=False)
        distance = fmean(point.distance for points in by_seed.values() for point in points)
        dots.append(((distance, mean.value), (mean.low, mean.high)))
    dots.sort()
    return [point for point, _ in dots], [bounds for _, bounds in dots]
