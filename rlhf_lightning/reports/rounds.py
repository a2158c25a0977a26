"""Rounds of a pipeline beside each other: what each made of the policy of the one before."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlhf_lightning.reports.html import text
from rlhf_lightning.reports.outcome import rate_bar
from rlhf_lightning.runs.metric_catalog import number, percent

Metrics = Mapping[str, float | None]

_ROUND = re.compile(r"round_(\d+)/(\w+)/(.+)")
# Judges of a win rate, the one that counts most first.
_JUDGES = (("gold", "gold reward"), ("human", "people"), ("judge", "a judge"))
_SCORE = ("score", "learnt score")
_COLUMNS = (
    ("policy", "score_win_rate", "wins by learnt score", percent),
    ("policy", "gold", "gold reward", number),
    ("policy", "kl_per_token", "KL from SFT, nats a token", number),
    ("policy", "response_length", "tokens an answer", number),
    ("reward", "accuracy", "reward model's accuracy", percent),
    ("reward", "label_ceiling", "its ceiling", percent),
)


def rounds_section(metrics: Metrics) -> str:
    """Return win rate by round with its interval, and what else the rounds differ in.

    Reads `round_<k>/<stage>/<name>` of a pipeline's summary; the policy's figures are those of the
    evaluation, or of PPO where there is none. "" with fewer than two rounds.
    """
    rounds = by_round(metrics)
    if len(rounds) < 2:
        return ""
    judge, name = next(
        (pair for pair in _JUDGES if _all_have(rounds, f"{pair[0]}_win_rate")), _SCORE
    )
    rates = {k: _rate(found["policy"], f"{judge}_win_rate") for k, found in rounds.items()}
    bars = "".join(
        rate_bar(f"round {k}", rate, low, high)
        for k, (rate, low, high) in rates.items()
        if rate is not None
    )
    return (
        '<section><h2>Rounds</h2><p class="lead">'
        f"Win rate against the SFT policy of round 1, by {name}, with its 95 % interval. The line "
        f"in the middle is 50 %, what chance would give; a grey bar is undecided.</p>"
        f'<dl class="domains">{bars}</dl>'
        f"{_table(rounds)}</section>"
    )


def by_round(metrics: Metrics) -> dict[int, dict[str, dict[str, float | None]]]:
    """Return round -> `policy` or `reward` -> name -> value, of the rounds that have a policy."""
    found: dict[int, dict[str, dict[str, float | None]]] = {}
    for key, value in metrics.items():
        match = _ROUND.fullmatch(key)
        if match is not None:
            number_, stage, name = match.groups()
            found.setdefault(int(number_), {}).setdefault(stage, {})[name] = value
    return {
        k: {"policy": stages.get("evaluate") or stages["ppo"], "reward": stages.get("reward", {})}
        for k, stages in sorted(found.items())
        if stages.get("evaluate") or stages.get("ppo")
    }


def _all_have(rounds: Mapping[int, Mapping[str, Metrics]], name: str) -> bool:
    return all(found["policy"].get(name) is not None for found in rounds.values())


def _rate(policy: Metrics, name: str) -> tuple[float | None, float | None, float | None]:
    return policy.get(name), policy.get(f"{name}_low"), policy.get(f"{name}_high")


def _table(rounds: Mapping[int, Mapping[str, Metrics]]) -> str:
    columns = [
        column
        for column in _COLUMNS
        if any(found[column[0]].get(column[1]) is not None for found in rounds.values())
    ]
    if not columns:
        return ""
    head = "".join(f"<th>{text(label)}</th>" for _, _, label, _ in columns)
    rows = []
    for k, found in rounds.items():
        values = [(found[part].get(name), show) for part, name, _, show in columns]
        cells = "".join(f"<td>{'' if v is None else text(show(v))}</td>" for v, show in values)
        rows.append(f"<tr><td>{k}</td>{cells}</tr>")
    return f'<div class="wide"><table><tr><th>round</th>{head}</tr>{"".join(rows)}</table></div>'
