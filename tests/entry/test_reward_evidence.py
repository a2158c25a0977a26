"""What a reward stage measures to tell overfitting, noise and too small a model apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_lightning.evaluation.reward_accuracy import comparable_rows
from tests.builders.runs import completed
from tests.evaluation.test_pairs import encoded_pairs

pytestmark = pytest.mark.timeout(300)


def test_training_pairs_and_another_model_are_held_against_the_held_out_accuracy(
    tmp_path: Path, start: Path
) -> None:
    first = completed(tmp_path / "first", "reward", start)
    other = f"evaluation.larger_reward_model={first.export}"
    gate = "gates.accuracy.at_least=1.1"
    again = completed(tmp_path / "again", "reward", start, other, gate)
    summary = json.loads(again.summary.read_text())
    found = summary["metrics"]
    assert 0 <= found["val/train_accuracy"] <= 1
    # It is the same model once more.
    assert found["val/larger_model_accuracy"] == pytest.approx(found["val/accuracy"])
    reason = next(g["reason"] for g in summary["gates"] if g["name"] == "accuracy")
    assert reason.split(". ")[1].startswith(("Overfitting: ", "Noise: ", "Capacity"))


def test_training_pairs_of_a_subset_that_is_never_held_out_are_not_compared() -> None:
    rows = encoded_pairs(12)  # every second one is of the subset `odd`
    even = [row for row in rows if not row.subsets]
    assert comparable_rows(rows, even, count=100) == even
    assert comparable_rows(rows, rows, count=100) == rows
    assert comparable_rows(rows, rows, count=4) == rows[::3]
    assert comparable_rows(rows, even, count=0) == []
    assert comparable_rows([*rows, *rows[:5] * 9], rows, count=100) == rows, "repeats count once"
    spread = comparable_rows(rows, rows, count=7)
    assert len(spread) == 7
    assert spread[-1] is rows[10], "7 of 12 are not the first 7"
