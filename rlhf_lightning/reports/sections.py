"""Sections of a page: wins, responses side by side, pairs, domains, rounds, reward over KL."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rlhf_lightning.reports.charts import Figure, Point, Series, histogram, line_chart, render
from rlhf_lightning.runs import metric_catalog as catalog
from rlhf_lightning.runs.folder import ITERATION
from rlhf_lightning.runs.metric_catalog import bound_keys, ends, number, percent, quantity
from rlhf_lightning.runs.summary import Metrics
from rlhf_lightning.runs.verdict import JUDGES

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
_ROOT = "√KL, of nats a response"
_ROUND_COLUMNS = (
    *("score_win_rate", "gold", "kl_per_token", "kl_per_response", "response_length"),
    *("accuracy", "label_ceiling"),
)


def domains_section(metrics: Metrics) -> str:
    """Return a bar a domain, with its 95 % interval where one was measured; "" without domains."""
    for key, measure in _DOMAIN_JUDGES:
        start = catalog.part_key(key, "domain", "")
        rates: dict[str, tuple[Any, ...]] = {
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
    whose = (n for n in JUDGES if all(f"{n}_win_rate" in own for own in rounds.values()))
    name = next(whose, "score")
    keys = (f"{name}_win_rate", *bound_keys(f"{name}_win_rate"))
    judged = {k: [own.get(key) for key in keys] for k, own in rounds.items()}
    known = {name for own in rounds.values() for name in own}
    labels = {n: quantity(f"val/{n}").label.removeprefix("held-out ") for n in _ROUND_COLUMNS}
    columns = {n: label for n, label in labels.items() if n in known}
    tables = {"rates": judged, "columns": columns, "rounds": rounds}
    return render("rounds.html", judge=JUDGES[name], show=catalog.show, **tables)


def by_round(metrics: Metrics, stages: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Return round -> name -> value, of the rounds whose policy was compared with another."""
    found: dict[str, dict[str, float | None]] = defaultdict(dict)
    for stage in stages:
        which, start = stage.partition("/")[0].removeprefix("round_"), f"{stage}/"
        own = {k: v for k, v in metrics.items() if k.startswith(start) and v is not None}
        found[which] |= {key.removeprefix(start): value for key, value in own.items()}
    return {k: own for k, own in found.items() if any(name.endswith("win_rate") for name in own)}


def overoptimization_section(rows: Rows, metrics: Metrics) -> str:
    """Return score, and gold where it is known, over the square root of the KL to the reference.

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
    chart = line_chart("score over the square root of KL", series, axis=_ROOT)
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
        for n in catalog.best_of_counts(metrics):
            key, kl = f"best_of/{n}/{name}", metrics.get(f"best_of/{n}/kl_per_response")
            if kl is not None and (value := metrics.get(key)) is not None:
                low, high = (metrics.get(bound) for bound in bound_keys(key))
                points.append((_root(kl), value))
                bounds.append((value if low is None else low, value if high is None else high))
                names.append(f"n={n}")
        unit = "share" if name in ("gold_win_rate", "pass_at_k", "maj_at_k") else ""
        series = [Series(label, points, "marks", bounds, names)]
        if chart := line_chart(label, series, unit=unit, axis=_ROOT):
            figures.append(Figure(f"{catalog.capitalized(label)} over √KL", chart))
    return figures


def _against_kl(rows: Rows, kl: str, value: str) -> list[Point]:
    points = [(_root(row[kl]), row[value]) for row in rows if kl in row and value in row]
    return [p for p in points if all(map(math.isfinite, p))]


def _held_out(rows: Rows, metrics: Metrics, name: str) -> list[Point]:
    """Return the baseline at KL 0, what was measured on the way, and the end."""
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


Lines = Sequence[Mapping[str, Any]]


def wins_figures(metrics: Mapping[str, float | None]) -> list[Figure]:
    """Return wins, ties and losses of the policy as one bar, for each judge that was asked."""
    figures = []
    for judge, label in JUDGES.items():
        name = f"val/{judge}_win_rate"
        rate, ties = metrics.get(name), metrics.get(f"val/{judge}_tie_rate")
        if rate is None or ties is None:
            continue
        won = rate - ties / 2
        shares = {"won": won, "tied": ties, "lost": max(1 - won - ties, 0.0)}
        parts = [(word, word, share, percent(share)) for word, share in shares.items()]
        known = ends(metrics, name)
        note = f"A tie counts one half{f'; 95 % interval {known}' * bool(known)}."
        chart = render("wins.html", parts=parts, note=note)
        figures.append(Figure(f"Comparisons, by {label}", chart, now=percent(rate)))
    return figures


def answers_figures(lines: Lines) -> tuple[list[Figure], str]:
    """Return histograms of score and length, and in words what they are of.

    Held-out responses of both sides, or else those of the first and the last rollout.
    """
    held_out = [line for line in lines if line.get("held_out") == "answers"][-1:]
    rollouts = [line for line in lines if "held_out" not in line]
    ends = (*rollouts[:1], *rollouts[-1:])
    sides: dict[str, Mapping[str, Any]] = {f"iteration {line[ITERATION]}": line for line in ends}
    for line in held_out:
        labels = ("before", "after") if line[ITERATION] else ("baseline", "policy")
        theirs = {name: line.get(f"baseline_{name}") for name in ("score", "length")}
        sides = dict(zip(labels, (theirs, line), strict=True))
    figures = []
    for name, title in (("score", "score of a response"), ("length", "tokens a response")):
        values = {label: _numbers(side.get(name)) for label, side in sides.items()}
        if parts := {label: part for label, part in values.items() if part}:
            means = [fmean(part) for part in parts.values()]
            shown = [number(mean, like=max(map(abs, means))) for mean in means]
            legends = [f"{label}, mean {mean}" for label, mean in zip(parts, shown, strict=True)]
            chart = histogram(title, parts, "responses")
            figures.append(Figure(catalog.capitalized(title), chart, legends=legends))
    count = max((len(_numbers(side.get("length"))) for side in sides.values()), default=0)
    what, of = ("held-out response", "a side") if held_out else ("response", "of a rollout")
    return figures, f"{catalog.counted(count, what)} {of}." * (count > 0)


def pairs_section(lines: Lines) -> str:
    """Return a reward model's margins, how far its probabilities hold, and its surest mistakes."""
    pairs = [line for line in lines if line.get("held_out") == "pairs"]
    margins = _numbers(pairs[-1]["margin"]) if pairs else []
    if not margins:
        return ""
    above, below = ([m for m in margins if (m > 0) is right] for right in (True, False))
    parts = {"ranked right": above, "ranked wrong": below}
    mean = f"mean {number(fmean(margins))}"
    chart = histogram("margin", parts, "pairs")
    figure = Figure("Margin", chart, now=mean, legends=list(parts))
    rows, wrong = pairs[-1]["reliability"], pairs[-1]["wrong"]
    return render("pairs.html", figure=figure, rows=rows, wrong=wrong, count=len(margins))


def _numbers(values: Iterable[float | None] | None) -> list[float]:
    """Return those of the numbers that are finite, as `to_json` has written them."""
    return [float(value) for value in values or () if value is not None]


_MAX_PAIRS, _MAX_ENDS = 12, 4


def samples_section(samples: Sequence[dict[str, Any]]) -> str:
    """Return responses beside those of the policy it started from, or else the best and worst."""
    compared = [s for s in samples if s.get("baseline_response") is not None]
    if not samples:
        return ""
    last = max(s["iteration"] for s in compared or samples)
    latest = [s for s in compared or samples if s["iteration"] == last]
    sides = ("before", "after") if last else ("baseline", "policy")  # of an evaluation
    cards, css = [_card(s, sides=sides) for s in latest[:_MAX_PAIRS]], ""
    scored = sorted((s for s in latest if _is_number(s.get("score"))), key=lambda s: -s["score"])
    if compared:
        lead = "Held-out prompts with the response of each side, not selected."
    elif len(scored) < 2:
        lead = f"From iteration {last}."
    else:
        count = min(_MAX_ENDS, len(scored) // 2)
        ends = zip(scored[:count], scored[: -count - 1 : -1], strict=True)
        cards = [_card(*one) for pair in ends for one in zip(pair, ("best", "worst"), strict=True)]
        lead, css = f"From iteration {last}: {count} with the highest score and the lowest.", "ends"
    systems = {str(s.get("system") or "") for s in latest}
    system = systems.pop() if len(systems) == 1 else ""
    for card, sample in zip(cards, latest, strict=False) if compared and not system else ():
        card["system"] = str(sample.get("system") or "")
    return render("samples.html", lead=lead, cards=cards, css=css, system=system)


def _card(
    sample: Mapping[str, Any], place: str = "", sides: tuple[str, str] = ("", "")
) -> dict[str, Any]:
    answers: list[tuple[str, ...]] = []
    if (was := sample.get("baseline_response")) is not None:
        answers = [(sides[0], figures(sample, "baseline_"), str(was))]
    now = str(sample.get("response", ""))
    answers.append((sides[1] if answers else "", figures(sample, ""), now, "now"))
    return {
        "prompt": sample.get("prompt", ""),
        "tag": " · ".join(filter(None, (place, str(sample.get("domain") or "")))),
        "answers": answers,
    }


def figures(sample: Mapping[str, Any], prefix: str) -> str:
    """Return score, KL and length of an answer as text; `prefix` names whose they are."""
    parts = []
    for key, name in (("score", "score"), ("kl", "KL estimate a token"), ("length", "tokens")):
        value: Any = sample.get(f"{prefix}{key}")
        if _is_number(value):
            parts.append(f"{name} {value if key == 'length' else number(value)}")
    if sample.get(f"{prefix}finished") is False:
        parts.append("cut off")
    return " · ".join(parts)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
