"""What a reward stage measures to tell overfitting, noise and too small a model apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders.runs import completed

pytestmark = pytest.mark.timeout(300)


@pytest.mark.thorough
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
