from __future__ import annotations

import re
from pathlib import Path

from rlhf_lightning.runs import metric_catalog as catalog
from rlhf_lightning.runs.metric_catalog import FAMILIES, QUANTITIES, bound_keys, quantity
from tests.builders.metrics import is_known

METRICS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
NAME = re.compile(
    r"`((?:collect|data|rollout|ppo|grpo|distillation|dpo|sft|reward|val|best_of|doctor|time|throughput)/[a-z0-9_<>/]+)`"
)


def test_the_table_of_quantities_and_the_page_of_metrics_name_the_same():
    names = NAME.findall(METRICS.read_text())
    page = {re.sub(r"<\w+>", "*", name) for name in names}
    assert len(page) > 60
    unknown = {name for name in page if not is_known(name) and name not in FAMILIES}
    assert not unknown, f"add to metrics.yaml or FAMILIES: {sorted(unknown)}"
    assert set(QUANTITIES) <= page, f"docs/metrics.md lacks {sorted(set(QUANTITIES) - page)}"


def test_a_domain_is_shown_as_the_whole_with_its_name_whatever_it_is_called():
    assert quantity("val/gold_win_rate/domain/a/b") == catalog.Quantity(
        "gold win rate: a/b", "share", [0.5, 1.0]
    )
    assert catalog.whole_key("val/accuracy_low/subset/low") == "val/accuracy_low"
    assert catalog.whole_key("val/gold_win_rate_low") == "val/gold_win_rate_low"
    assert bound_keys("val/gold_win_rate/domain/low") == (
        "val/gold_win_rate_low/domain/low",
        "val/gold_win_rate_high/domain/low",
    )
    assert quantity("best_of/16/gold_win_rate") == catalog.Quantity(
        "gold win rate, best of 16", "share"
    )
    assert bound_keys("val/accuracy") == ("val/accuracy_low", "val/accuracy_high")
