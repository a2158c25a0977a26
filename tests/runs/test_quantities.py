from __future__ import annotations

import re
from pathlib import Path

from rlhf_lightning.runs.quantities import FAMILIES, QUANTITIES, bands, bands_table, is_known

METRICS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
NAME = re.compile(r"`((?:data|rollout|ppo|sft|reward|val|doctor|time|throughput)/[a-z0-9_<>]+)`")


def documented() -> set[str]:
    names = NAME.findall(METRICS.read_text())
    return {re.sub(r"<\w+>", "*", name) for name in names}


def test_the_table_of_quantities_and_the_page_of_metrics_name_the_same():
    page = documented()
    assert len(page) > 60
    unknown = {name for name in page if not is_known(name) and name not in FAMILIES}
    assert not unknown, f"add to QUANTITIES or FAMILIES: {sorted(unknown)}"
    assert set(QUANTITIES) <= page, f"docs/metrics.md lacks {sorted(set(QUANTITIES) - page)}"


def test_every_band_is_on_the_page_as_it_is_drawn():
    assert bands_table() in METRICS.read_text()
    for name, (low, high) in bands().items():
        assert low <= high, name


def test_an_unknown_name_is_not_known():
    assert is_known("val/gold_win_rate_sums")
    assert not is_known("val/gold_reward")
    assert not is_known("rollout/nonsense")
