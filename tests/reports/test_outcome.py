from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from rlhf_lightning.reports.sections import (
    best_of_figures,
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


def test_the_best_of_each_n_is_a_point_with_its_interval_and_its_n():
    metrics = {f"best_of/{n}/kl_per_response": kl for n, kl in ((1, 0.0), (4, 0.64))}
    metrics |= {"best_of/1/gold_win_rate": 0.5, "best_of/4/gold_win_rate": 0.6}
    metrics |= {"best_of/4/gold_win_rate_low": 0.3, "best_of/4/gold_win_rate_high": 0.9}
    (figure,) = best_of_figures(metrics)
    shape = ET.fromstring(figure.chart)
    assert [t.text for t in shape.iter("text") if t.get("class") == "dot-name"] == ["n=1", "n=4"]
    first, second = (
        [float(point.split(",")[1]) for point in str(line.get("points")).split()]
        for line in shape.iter("polyline")
        if line.get("class") == "faint s0"
    )
    assert first[0] == first[1]  # nothing is known of its interval
    curve = next(line for line in shape.iter("polyline") if line.get("class") == "line s0")
    end = float(str(curve.get("points")).split(",")[-1])
    assert second[0] - end == pytest.approx(end - second[1], abs=0.2)  # pixels grow downwards
    assert second[0] > second[1]
    assert best_of_figures({"val/gold_win_rate": 0.5}) == []
