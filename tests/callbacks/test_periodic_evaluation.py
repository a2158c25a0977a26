"""Evaluations during PPO: they log what was measured, and change nothing else."""

from __future__ import annotations

import pytest

from rlhf_lightning.runs.folder import read_metrics
from tests.builders.runs import completed

pytestmark = pytest.mark.timeout(300)


@pytest.mark.thorough
def test_an_evaluation_during_training_is_logged_and_changes_no_rollout(tmp_path, start):
    alone = "artifacts.reward=null"  # the score is a function
    every = ["evaluation.every_n_iterations=2", "evaluation.during_training=6"]
    with_it = completed(tmp_path / "with", "ppo", start, alone, *every)
    without = completed(tmp_path / "without", "ppo", start, alone)
    rows, others = read_metrics(with_it.metrics), read_metrics(without.metrics)
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    measured = [{name for name in row if name.startswith("val/")} for row in rows]
    assert not measured[0]
    assert not measured[2]  # and not the values of iteration 2 once more
    wanted = {"val/gold", "val/gold_win_rate", "val/score", "val/kl_per_token", "val/self_bleu"}
    assert wanted <= measured[1]
    assert rows[1]["val/num_prompts"] == 6
    assert rows[1]["time/evaluate"] > 0
    for row, other in zip(rows, others, strict=True):
        for name, value in other.items():
            if not name.startswith(("time/", "throughput/")):
                assert row[name] == value, name
