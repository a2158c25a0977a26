"""What came out, beyond one figure: by domain, and over the distance from the SFT policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlhf_lightning.reports.charts import Point, Series, line_chart
from rlhf_lightning.reports.html import text
from rlhf_lightning.runs.metric_catalog import bound_keys, part_key, percent

Metrics = Mapping[str, float | None]
Rows = Sequence[Mapping[str, float]]

_JUDGES = (
    ("val/gold_win_rate", "gold reward"),
    ("val/score_win_rate", "learnt score"),
    ("val/accuracy", "held-out pairs"),
)


def domains_section(metrics: Metrics) -> str:
    """Return a bar a domain, with its 95 % interval where one was measured; "" without domains."""
    measured = [(p, judge, domain_rates(metrics, p)) for p, judge in _JUDGES]
    prefix, judge, rates = next((m for m in measured if len(m[2]) > 1), ("", "", {}))
    if not rates:
        return ""
    bars = "".join(
        rate_bar(name.replace("_", " "), *rates[name])
        for name in sorted(rates, key=lambda n: -rates[n][0])
    )
    what = "Accuracy" if prefix == "val/accuracy" else "Win rate against the policy before"
    return (
        '<section><h2>By domain</h2><p class="lead">'
        f"{what}, by {judge}. The line in the middle is 50 %, what chance would "
        "give; a bar is grey where the interval holds it: undecided.</p>"
        f'<dl class="domains">{bars}</dl></section>'
    )


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


def rate_bar(name: str, rate: float, low: float | None, high: float | None) -> str:
    """Return a rate as a bar with its interval over it, for a list of class `domains`."""
    tone = "" if rate >= 0.5 else " class='bad'"
    if low is not None and high is not None and low <= 0.5 <= high:
        tone = " class='undecided'"
    interval = ""
    if low is not None and high is not None:
        width = 100 * max(high - low, 0)
        interval = f'<u style="left:{100 * low:.1f}%;width:{width:.1f}%"></u>'
    return (
        f'<div><dt>{text(name)}</dt><dd class="bar">'
        f'<i{tone} style="width:{100 * rate:.1f}%"></i>{interval}<b></b></dd>'
        f'<dd class="rate">{percent(rate)}</dd></div>'
    )


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
    key = " ".join(
        f'<span class="legend"><span class="s{i}t">●</span> {text(s.label)}</span>'
        for i, s in enumerate(series)
    )
    gold = (
        "Gold falling while the score rises would be over-optimisation."
        if any(s.label.startswith("gold") for s in series)
        else "No gold reward is known here: read the samples for what the score cannot see."
    )
    return (
        '<section><h2>Over-optimisation</h2><p class="lead">Reward over the square root of the KL '
        f"from the SFT policy, nats a response. {gold}</p>"
        '<div class="charts one"><figure><figcaption><b>Reward over √KL</b>'
        f'<span class="now"></span><span class="key">{key}</span></figcaption>'
        f"{chart}</figure></div></section>"
    )


def _against_kl(rows: Rows, kl: str, value: str) -> list[Point]:
    points = [(_root(row[kl]), row[value]) for row in rows if kl in row and value in row]
    return [p for p in points if all(map(math.isfinite, p))]


def _held_out(rows: Rows, metrics: Metrics, name: str) -> list[Point]:
    """Return the SFT policy at KL 0, what was measured on the way, and the end."""
    kl, after = metrics.get("val/kl_per_response"), metrics.get(f"val/{name}")
    ended = kl is not None and after is not None
    # The end is measured on more prompts than the last iteration of the way.
    way = rows[:-1] if ended else rows
    points = _against_kl(way, "val/kl_per_response", f"val/{name}")
    before = metrics.get(f"val/baseline_{name}")
    if before is not None:
        points.insert(0, (0.0, before))
    if kl is not None and after is not None:
        points.append((_root(kl), after))
    return sorted(points)


def _root(kl: float) -> float:
    return math.sqrt(max(kl, 0.0))
