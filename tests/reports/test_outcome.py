from __future__ import annotations

import re

from rlhf_lightning.reports.sections import (
    domains_section,
    overoptimization_section,
)

METRICS = {
    "val/gold_win_rate": 0.7,
    "val/gold_win_rate_low": 0.65,
    "val/gold_win_rate_high": 0.75,
    "val/gold_win_rate/domain/sums": 0.8,
    "val/gold_win_rate_low/domain/sums": 0.7,
    "val/gold_win_rate_high/domain/sums": 0.9,
    "val/gold_win_rate/domain/talk": 0.3,
    "val/gold_win_rate/domain/how_to": None,
    "val/kl_per_response": 4.0,
    "val/score": 1.5,
    "val/baseline_score": 0.0,
    "val/gold": 0.5,
    "val/baseline_gold": 1.0,
}


def test_the_best_domain_comes_first_and_one_below_chance_is_red():
    section = domains_section(METRICS)
    assert section.index("sums") < section.index("talk")
    assert re.findall(r"<i(?: class='bad')? style=\"width:[\d.]+%", section) == [
        '<i style="width:80.0%',
        "<i class='bad' style=\"width:30.0%",
    ]
    assert '<u style="left:70.0%;width:20.0%">' in section


def test_reward_is_drawn_over_the_root_of_kl_from_the_sft_policy_to_the_end():
    rows = [
        {"iteration": i, "rollout/kl_per_response": float(i**2), "rollout/score": i / 2}
        for i in (0, 1, 2)
    ]
    section = overoptimization_section(rows, METRICS)
    dots = [float(x) for x in re.findall(r'class="s0 dot" cx="([\d.]+)"', section)]
    assert len(dots) == 3
    assert abs((dots[1] - dots[0]) - (dots[2] - dots[1])) <= 0.2, "x is the root, so steps are even"
    gold = re.search(r'<polyline class="line s2" points="(\S+),(\S+) (\S+),(\S+)"', section)
    assert gold is not None, "gold is the third series: SFT and the end"
    assert float(gold[1]) == dots[0], "the SFT policy is at KL 0"
    assert float(gold[3]) == dots[2], "4 nats are 2 on the axis"
    assert float(gold[4]) > float(gold[2]), "gold fell"
    assert "over-optimisation" in section
