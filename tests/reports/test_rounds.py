"""The rounds of a pipeline in its report."""

from __future__ import annotations

import re

from rlhf_lightning.reports.sections import rounds_section

METRICS: dict[str, float | None] = {
    "val/gold_win_rate": 0.9,
    "round_1/reward/accuracy": 0.91,
    "round_1/ppo/gold_win_rate": 0.5,
    "round_1/evaluate/gold_win_rate": 0.8,
    "round_1/evaluate/gold_win_rate_low": 0.75,
    "round_1/evaluate/gold_win_rate_high": 0.85,
    "round_1/evaluate/kl_per_token": 0.2,
    "round_2/reward/accuracy": 0.88,
    "round_2/ppo/gold_win_rate": 0.9,
    "round_2/ppo/kl_per_token": 0.3,
    "round_2/collect/num_pairs": 5000.0,
    "round_10/collect/num_pairs": 5000.0,  # has not come further
}


STAGES = [
    *(f"round_{k}/{stage}" for k in (1, 2) for stage in ("reward", "ppo", "evaluate")),
    "round_10/collect",
]


def test_every_round_has_its_win_rate_with_the_interval_and_a_row() -> None:
    section = rounds_section(METRICS, STAGES)
    assert "by the gold reward" in section
    assert section.index("round 1") < section.index("round 2")
    assert '<i style="width:80.0%"></i><u style="left:75.0%;width:10.0%"></u>' in section
    assert "<th>held-out KL, per token, nats</th>" in section
    rows = re.findall(r"<tr><td>(\d+)</td>(.*?)</tr>", section)
    assert [row[0] for row in rows] == ["1", "2"]
    assert "0.2" in rows[0][1]
    assert "88.0" in rows[1][1]
