"""Metrics of one iteration's responses that the module does not log.

It takes one record per response, those of all ranks together, and the result does not depend on how
they were shared: records are put in the order of their rows first.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DOMAIN = "domain_score/"


@dataclass(frozen=True)
class ResponseRecord:
    """One response of a rollout.

    Args:
        row_id: global index of the row in the stream of prompts.
        group_id: equal for the responses to one prompt.
        domain: domain of its prompt, "" where there is none.
        score: score by the scorer, unshaped.
        length: response tokens, EOS included.
        tokens: ids of the response.
        surplus: sum over its tokens of surprise less entropy, -log p - H, in nats.
        surplus_squares: sum of the squares of these differences.
        second: score by the second scorer; None without one.
        refused: whether it is a refusal; None where its prompt is not a harmful one.
    """

    row_id: int
    group_id: int
    domain: str
    score: float
    length: int
    tokens: tuple[int, ...]
    surplus: float
    surplus_squares: float
    second: float | None = None
    refused: bool | None = None


def response_metrics(
    records: Sequence[ResponseRecord], *, score_clip: float | None, second_scorer: bool = False
) -> dict[str, float]:
    """Return the metrics of one iteration by name; unavailable ones are left out.

    `length_correlation`: of score and length, each less its domain's mean. `most_common`: share of
    the most frequent response, where copies to one prompt alone are one. `clipped`: share of scores
    at `score_clip` or beyond. `sampler_bias` and its standard error `sampler_error`: mean over
    tokens of surprise less entropy, in nats, whose expectation is 0 exactly if the tokens were
    drawn from that distribution. `refusal_rate`: share of the responses to harmful prompts;
    `harmful_prompts` is the number of these prompts, however many responses each has. With a second
    scorer `second_score`, `second_std` and `second_correlation`. `domain_score/<domain>`: by the
    score, or by the `second_scorer` if there is one, in the iterations in which it ran.
    """
    rows = sorted(records, key=lambda record: record.row_id)
    tokens = sum(row.length for row in rows)
    found = {
        "sampler_bias": math.fsum(row.surplus for row in rows) / max(tokens, 1),
        "sampler_error": math.sqrt(math.fsum(row.surplus_squares for row in rows)) / max(tokens, 1),
    }
    prompts: Mapping[tuple[int, ...], set[int]] = defaultdict(set)
    for row in rows:
        prompts[row.tokens].add(row.group_id)
    if len({row.group_id for row in rows}) > 1:
        common = Counter(row.tokens for row in rows if len(prompts[row.tokens]) > 1)
        found["most_common"] = max(common.values(), default=1) / len(rows)
    known = [row for row in rows if not math.isnan(row.score)]
    by_length = known and correlation(
        centred([(row.domain, row.score) for row in known]),
        centred([(row.domain, float(row.length)) for row in known]),
    )
    if isinstance(by_length, float):
        found["length_correlation"] = by_length
    if score_clip is not None:
        found["clipped"] = sum(abs(row.score) >= score_clip for row in known) / max(len(known), 1)
    refusals = [(row.group_id, row.refused) for row in rows if row.refused is not None]
    if refusals:
        found["refusal_rate"] = sum(refused for _, refused in refusals) / len(refusals)
        found["harmful_prompts"] = float(len({group for group, _ in refusals}))
    watched = [] if second_scorer else [row.score for row in known]
    asked = [row for row in known if row.second is not None and not math.isnan(row.second)]
    if asked and all(row.second is not None for row in rows):
        known, watched = asked, [float(row.second or 0.0) for row in asked]
        found |= _second(watched, [row.score for row in asked])
    by_domain: Mapping[str, list[float]] = defaultdict(list)
    for row, value in zip(known if watched else [], watched, strict=True):
        by_domain[row.domain].append(value)
    if len(by_domain) > 1:
        means = {name: math.fsum(v) / len(v) for name, v in sorted(by_domain.items())}
        found |= {f"{DOMAIN}{name}": value for name, value in means.items()}
    return found


def _second(seconds: Sequence[float], scores: Sequence[float]) -> dict[str, float]:
    mean = math.fsum(seconds) / len(seconds)
    variance = math.fsum((value - mean) ** 2 for value in seconds) / len(seconds)
    found = {"second_score": mean, "second_std": math.sqrt(variance)}
    agreement = correlation(scores, seconds)
    if agreement is not None:
        found["second_correlation"] = agreement
    return found


def centred(values: Sequence[tuple[str, float]]) -> list[float]:
    """Return each value less the mean of its group."""
    groups: dict[str, list[float]] = defaultdict(list)
    for name, value in values:
        groups[name].append(value)
    means = {name: math.fsum(group) / len(group) for name, group in groups.items()}
    return [value - means[name] for name, value in values]


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Pearson's correlation of two equally long lists; None if one does not vary."""
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    dx, dy = [value - mean_x for value in x], [value - mean_y for value in y]
    var_x, var_y = math.fsum(v * v for v in dx), math.fsum(v * v for v in dy)
    # What rounding leaves of equal values is no variation.
    if var_x <= 1e-12 * (1 + mean_x**2) or var_y <= 1e-12 * (1 + mean_y**2):
        return None
    return math.fsum(a * b for a, b in zip(dx, dy, strict=True)) / math.sqrt(var_x * var_y)
