"""The arithmetic of the comparison of three rounds with one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.studies.rounds import (
    interval_over_seeds,
    pooled_interval,
    report,
)
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import new_summary, write_summary


def test_the_interval_is_that_of_the_mean_over_seeds_of_means_over_prompts() -> None:
    rng = np.random.default_rng(1)
    by_seed = [rng.normal(mean, 1.0, 400) for mean in (0.0, 0.3, 0.6)]
    mean, low, high = pooled_interval(by_seed)
    assert mean == pytest.approx(np.mean([d.mean() for d in by_seed]))
    # Three independent means of 400: a standard error of 1 / sqrt(1200).
    assert high - low == pytest.approx(2 * 1.96 / np.sqrt(1200), rel=0.1)
    assert low < mean < high


def test_the_interval_over_seeds_is_students_and_needs_two() -> None:
    # Means 1, 2, 3: standard error 1 / sqrt(3); the 0.975 quantile of t with 2 degrees is 4.30265.
    found = interval_over_seeds([np.full(5, mean) for mean in (1.0, 2.0, 3.0)])
    assert found == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert interval_over_seeds([np.ones(5)]) is None


def test_the_report_reads_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "seed_2"
    for place, metrics in (
        ("three/2026-11-02_09-30-00", {"round_3/ppo/gold": 2.0, "round_3/ppo/length": 9.0}),
        ("one", {"val/gold": 1.0}),
    ):
        made = new_summary("ppo", seed=2, config_hash="x")
        run = RunFolder(folder / place).create()
        write_summary(run, replace(made, metrics=metrics))
    paired = {"gold": {"three": [[2.0]] * 9, "one": [[1.0]] * 9}, "kl_per_token": {}}
    (folder / "paired.json").write_text(json.dumps(paired))
    found = report(tmp_path)
    assert (found["difference"], found["low"], found["high"]) == (1.0, 1.0, 1.0)
    assert found["seeds"][0]["rounds"] == {"round_3/ppo/gold": 2.0}
    assert found["seeds"][0]["one"]["gold"] == 1.0
