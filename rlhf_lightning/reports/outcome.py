"""Results beyond one figure: by domain, by round, and over the distance from the SFT policy."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rlhf_lightning.reports.charts import Figure, Point, Series, line_chart
from rlhf_lightning.reports.html import render
from rlhf_lightning.runs.metric_catalog import (
    best_of_counts,
    bound_keys,
    capitalized,
    number,
    part_key,
    percent,
)

Metrics = Mapping[str, float | None]
Rows = Sequence[Mapping[str, float]]

_DOMAIN_JUDGES = (
    ("val/gold_win_rate", "gold reward"),
    ("val/score_win_rate", "learnt score"),
    ("val/accuracy", "held-out pairs"),
)
_BEST_OF = {
    "gold_win_rate": "gold win rate",
    "gold": "gold reward",
    "score": "learnt score",
    "response_length": "tokens a response",
}
_ROUND = re.compile(r"round_(\d+)/(\w+)/(.+)")
# Judges of a win rate, the one that counts most first.
_ROUND_JUDGES = {"gold": "gold reward", "human": "people", "judge": "a judge"}
_ROUND_COLUMNS = (
    ("policy", "score_win_rate", "wins by learnt score", percent),
    ("policy", "gold", "gold reward", number),
    ("policy", "kl_per_token", "KL from SFT, nats a token", number),
    ("policy", "response_length", "tokens a response", number),
    ("reward", "accuracy", "reward model's accuracy", percent),
    ("reward", "label_ceiling", "its ceiling", percent),
)


def domains_section(metrics: Metrics) -> str:
    """Return a bar a domain, with its 95 % interval where one was measured; "" without domains."""
    for prefix, judge in _DOMAIN_JUDGES:
        rates = domain_rates(metrics, prefix)
        if len(rates) > 1:
            best_first = sorted(rates.items(), key=lambda item: -item[1][0])
            accuracy = prefix == "val/accuracy"
            measure = "Accuracy" if accuracy else "Win rate against the baseline"
            return render("domains.html", rates=best_first, judge=judge, measure=measure)
    return ""


def domain_rates(
    metrics: Metrics, prefix: str
) -> dict[str, tuple[float, float | None, float | None]]:
    """Return domain -> rate and its interval, of the metrics `<prefix>/domain/<domain>`."""
    found = {}
    for name, value in metrics.items():
        domain = name.removeprefix(part_key(prefix, "domain", ""))
        if domain == name or value is None:
            continue
        low, high = (metrics.get(bound) for bound in bound_keys(name))
        found[domain] = (value, low, high)
    return found


def rounds_section(metrics: Metrics) -> str:
    """Return win rate by round with its interval, and a table of the other differences.

    Reads `round_<k>/<stage>/<name>` of a pipeline's summary; the policy's figures are those of the
    evaluation, or of PPO where there is none. "" with fewer than two rounds.
    """
    rounds = by_round(metrics)
    if len(rounds) < 2:
        return ""
    policies = {k: found["policy"] for k, found in rounds.items()}
    name = next(
        (
            name
            for name in _ROUND_JUDGES
            if all(policy.get(f"{name}_win_rate") is not None for policy in policies.values())
        ),
        "score",
    )
    key = f"{name}_win_rate"
    rates = {
        k: [p.get(key), p.get(f"{key}_low"), p.get(f"{key}_high")] for k, p in policies.items()
    }
    cells = {
        label: [
            "" if (value := found[part].get(name)) is None else show(value)
            for found in rounds.values()
        ]
        for part, name, label, show in _ROUND_COLUMNS
    }
    columns = {label: column for label, column in cells.items() if any(column)}
    return render(
        "rounds.html",
        judge=_ROUND_JUDGES.get(name, "learnt score"),
        rates=rates,
        columns=columns,
        rows=dict(zip(rounds, zip(*columns.values(), strict=True), strict=False)),
    )


def by_round(metrics: Metrics) -> dict[int, dict[str, dict[str, float | None]]]:
    """Return round -> `policy` or `reward` -> name -> value, of the rounds that have a policy."""
    found: dict[int, dict[str, dict[str, float | None]]] = defaultdict(lambda: defaultdict(dict))
    for key, value in metrics.items():
        match = _ROUND.fullmatch(key)
        if match is not None:
            found[int(match[1])][match[2]][match[3]] = value
    return {
        k: {"policy": policy, "reward": stages["reward"]}
        for k, stages in sorted(found.items())
        if (policy := stages["evaluate"] or stages["ppo"])
    }


def overoptimization_section(rows: Rows, metrics: Metrics) -> str:
    """Return score, and gold where it is known, over the square root of the KL from the SFT policy.

    Source: Gao et al. 2023, figure 1: both are smooth functions of sqrt(KL); where gold turns while
    the score still rises, the policy exploits the reward model. "" without score or KL.
    """
    score = _against_kl(rows, "rollout/kl_per_response", "rollout/score")
    if len(score) < 2:
        return ""
    series = [Series("learnt score, training", score, "dots")]
    for name, label in (("score", "learnt score, held-out"), ("gold", "gold reward, held-out")):
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
            key = f"best_of/{n}/{name}"
            kl, value = metrics.get(f"best_of/{n}/kl_per_response"), metrics.get(key)
            if kl is None or value is None:
                continue
            low, high = (metrics.get(bound) for bound in bound_keys(key))
            points.append((_root(kl), value))
            bounds.append((value if low is None else low, value if high is None else high))
            names.append(f"n={n}")
        unit = "share" if name == "gold_win_rate" else ""
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
