"""Results beyond one figure: by domain, by round, and over the distance from the SFT policy."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rlhf_lightning.reports.charts import Figure, Point, Series, line_chart
from rlhf_lightning.reports.html import render
from rlhf_lightning.runs.metric_catalog import (
    best_of_counts,
    bound_keys,
    capitalized,
    part_key,
    quantity,
)

Metrics = Mapping[str, float | None]
Rows = Sequence[Mapping[str, float]]

_DOMAIN_JUDGES = (
    ("val/gold_win_rate", "Win rate against the baseline, by the gold reward"),
    ("val/score_win_rate", "Win rate against the baseline, by the score"),
    ("val/accuracy", "Accuracy on held-out pairs"),
)
_BEST_OF = {
    "gold_win_rate": "gold win rate",
    "pass_at_k": "pass@k: any of n is right",
    "maj_at_k": "maj@k: the most frequent answer is right",
    "gold": "gold reward",
    "score": "score",
    "response_length": "tokens a response",
}
# Judges of a win rate, the one that counts most first.
_ROUND_JUDGES = {"gold": "the gold reward", "human": "people", "judge": "a judge"}
_ROUND_COLUMNS = (
    *("score_win_rate", "gold", "kl_per_token", "kl_per_response", "response_length"),
    *("accuracy", "label_ceiling"),
)


def domains_section(metrics: Metrics) -> str:
    """Return a bar a domain, with its 95 % interval where one was measured; "" without domains."""
    for key, measure in _DOMAIN_JUDGES:
        start = part_key(key, "domain", "")
        rates = {
            name.removeprefix(start): (value, *map(metrics.get, bound_keys(name)))
            for name, value in metrics.items()
            if name.startswith(start) and value is not None
        }
        if len(rates) > 1:
            best_first = sorted(rates.items(), key=lambda item: -item[1][0])
            return render("domains.html", rates=best_first, measure=measure)
    return ""


def rounds_section(metrics: Metrics, stages: Sequence[str]) -> str:
    """Return win rate by round with its interval, and a table of the other differences.

    Args:
        metrics: `round_<k>/<stage>/<name>` of a pipeline's summary.
        stages: its `round_<k>/<stage>`, as they ran; a later one's figure takes an earlier one's
            place.

    Returns:
        "" with fewer than two rounds that have a policy.
    """
    rounds = by_round(metrics, stages)
    if len(rounds) < 2:
        return ""
    whose = (n for n in _ROUND_JUDGES if all(f"{n}_win_rate" in own for own in rounds.values()))
    name = next(whose, "score")
    keys = (f"{name}_win_rate", *bound_keys(f"{name}_win_rate"))
    rates = {k: [own.get(key) for key in keys] for k, own in rounds.items()}
    columns = {
        n: quantity(f"val/{n}") for n in _ROUND_COLUMNS if any(n in own for own in rounds.values())
    }
    judge = _ROUND_JUDGES.get(name, "the score")
    return render("rounds.html", judge=judge, rates=rates, columns=columns, rounds=rounds)


def by_round(metrics: Metrics, stages: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Return round -> name -> value, of the rounds whose policy was compared with another."""
    found: dict[str, dict[str, float | None]] = defaultdict(dict)
    for stage in stages:
        found[stage.partition("/")[0].removeprefix("round_")] |= {
            key.removeprefix(f"{stage}/"): value
            for key, value in metrics.items()
            if key.startswith(f"{stage}/") and value is not None
        }
    return {k: own for k, own in found.items() if any(name.endswith("win_rate") for name in own)}


def overoptimization_section(rows: Rows, metrics: Metrics) -> str:
    """Return score, and gold where it is known, over the square root of the KL from the SFT policy.

    Source: Gao et al. 2023, figure 1: both are smooth functions of sqrt(KL); where gold turns while
    the score still rises, the policy exploits the reward model. "" without score or KL.
    """
    score = _against_kl(rows, "rollout/kl_per_response", "rollout/score")
    if len(score) < 2:
        return ""
    series = [Series("score, training", score, "dots")]
    for name, label in (("score", "score, held-out"), ("gold", "gold reward, held-out")):
        points = _held_out(rows, metrics, name)
        if len(points) > 1:
            series.append(Series(label, points, "marks"))
    chart = line_chart("score over the square root of KL", series, whole=False)
    labels = [s.label for s in series]
    figure = Figure("Reward over √KL", chart, legends=labels)
    return render("overoptimization.html", figure=figure, gold="gold reward, held-out" in labels)


def best_of_figures(metrics: Metrics) -> list[Figure]:
    """Return the curves of best-of-n over the root of its KL, from `best_of/<n>/<name>`.

    The axis is that of `overoptimization_section`, so that the two can be compared.
    """
    figures = []
    for name, label in _BEST_OF.items():
        points: list[Point] = []
        bounds: list[Point] = []
        names = []
        for n in best_of_counts(metrics):
            key, kl = f"best_of/{n}/{name}", metrics.get(f"best_of/{n}/kl_per_response")
            if kl is not None and (value := metrics.get(key)) is not None:
                low, high = (metrics.get(bound) for bound in bound_keys(key))
                points.append((_root(kl), value))
                bounds.append((value if low is None else low, value if high is None else high))
                names.append(f"n={n}")
        unit = "share" if name in ("gold_win_rate", "pass_at_k", "maj_at_k") else ""
        series = [Series(label, points, "marks", bounds, names)]
        if chart := line_chart(label, series, unit=unit, whole=False):
            figures.append(Figure(f"{capitalized(label)} over √KL", chart))
    return figures


def _against_kl(rows: Rows, kl: str, value: str) -> list[Point]:
    points = [(_root(row[kl]), row[value]) for row in rows if kl in row and value in row]
    return [p for p in points if all(map(math.isfinite, p))]


def _held_out(rows: Rows, metrics: Metrics, name: str) -> list[Point]:
    """Return the SFT policy at KL 0, what was measured on the way, and the end."""
    kl, after = metrics.get("val/kl_per_response"), metrics.get(f"val/{name}")
    before = metrics.get(f"val/baseline_{name}")
    ends = [] if before is None else [(0.0, before)]
    if kl is not None and after is not None:
        # The end is measured on more prompts than the last iteration of the way.
        ends.append((_root(kl), after))
        rows = rows[:-1]
    return sorted([*ends, *_against_kl(rows, "val/kl_per_response", f"val/{name}")])


def _root(kl: float) -> float:
    return math.sqrt(max(kl, 0.0))
