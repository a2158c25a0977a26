"""The law's tables and charts on the page of a study, of points that a known law made."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from rlhf_lightning.evaluation.overoptimization import Law, Point

from rlhf_lightning.reports.overoptimization import (
    _dots,
    laws_table,
    left_out_table,
    overoptimization,
    pursuits,
)
from rlhf_lightning.reports.study import write_study
from rlhf_lightning.reports.study_results import Result, RewardModel, Study
from rlhf_lightning.runs.folder import ITERATION

SIZES = {"tiny": 1_000, "small": 10_000, "medium": 100_000, "large": 1_000_000}
MODELS = {f"ppo_{name}": RewardModel(size, 500, "PPO") for name, size in SIZES.items()}
BEST = {"best": RewardModel(1_000, 500, "best of n")}


def law(size: int, seed: int) -> Law:
    return Law("rl", 0.3 * math.log10(size) + 0.01 * seed, 1.0 - 0.05 * math.log10(size))


def run(row: str, seed: int, rows: list[dict[str, float]], **changes) -> Result:
    plain = Result(
        row, "", seed, status="completed", cause=None, data_set=f"demo_seed{seed}", answers=8,
        metrics={"val/gold": 1.0}, rows=rows, seconds=1.0, cpu_seconds=1.0, peak_mib=1.0,
        times_are_whole=True,
    )  # fmt: skip
    return replace(plain, **changes)


def measured(kl: float, gold: float, score: float = 0.0) -> dict[str, float]:
    return {
        "val/kl_per_response": kl, "val/gold": gold, "val/baseline_gold": 9.0, "val/score": score,
        "val/baseline_score": 0.1,
    }  # fmt: skip


def made(row: str, size: int, seed: int) -> Result:
    one = law(size, seed)
    steps = [0.0, 0.5, 1.0, 2.0, 3.0, 5.0]
    rows = [measured(d * d, 1.0 + one.gain(d), 0.2 + d) for d in steps]
    numbered = [{ITERATION: float(i), **measured_there} for i, measured_there in enumerate(rows, 1)]
    return run(row, seed, [{ITERATION: 0.0, "rollout/score": 0.0}, *numbered])


RESULTS = [made(row, model.parameters, seed) for seed in (1, 2) for row, model in MODELS.items()]


def test_gold_is_gained_over_the_first_measurement_of_the_policy_itself():
    one, *_ = pursuits(RESULTS[:1], MODELS)
    assert one.gold[0] == (0.0, 0.0)
    assert one.proxy[-1] == pytest.approx((5.0, 5.0))
    assert (one.law.a, one.law.b, one.law.r2) == pytest.approx((0.91, 0.85, 1.0))
    late = replace(RESULTS[0], rows=RESULTS[0].rows[2:])
    one, *_ = pursuits([late], MODELS)
    assert one.gold[0].gain == pytest.approx(RESULTS[0].rows[2]["val/gold"] - 9.0)


def test_the_best_of_each_n_is_one_way_of_a_seed():
    results = [
        run("best", seed, [], setting=f"n={n}", metrics=measured(math.log(n), 9 + n / 10))
        for n in (2, 4, 8, 16)
        for seed in (1, 2)
    ]
    found = pursuits(results, BEST)
    assert [(one.seed, one.way, len(one.gold)) for one in found] == [
        (1, "best_of_n", 4), (2, "best_of_n", 4),
    ]  # fmt: skip
    assert found[0].gold[1] == pytest.approx((math.sqrt(math.log(4)), 0.4))


def test_what_failed_or_follows_no_named_model_is_left_out():
    failed = replace(RESULTS[0], status="failed")
    assert pursuits([failed, replace(RESULTS[1], row="other")], MODELS) == []
    assert overoptimization([replace(failed, row="other")], MODELS) == ([], [], ("", []))
    told, tables, (_, charts) = overoptimization([failed, *RESULTS[1:4]], MODELS)
    assert told[0] == "The law explains at least 95 % of the variance of gold in 3 of 4 runs."
    assert told[1].endswith(": ppo_tiny seed 1.")
    assert [row[-1] for row in tables[0].rows] == ["1 of 1"] * 3
    assert len(charts) == 1


def test_each_size_is_predicted_by_the_others():
    table, errors = left_out_table(pursuits(RESULTS, MODELS))
    assert len(table.rows) == 4
    assert errors == pytest.approx([0.0] * 4, abs=1e-6)
    assert all(row[2] == row[3] != "none" for row in table.rows)


def test_a_peak_beyond_what_was_measured_is_not_reported():
    early = [replace(result, rows=result.rows[:5]) for result in RESULTS]  # up to a distance of 2
    found = pursuits(early, MODELS)
    assert [row[6] for row in laws_table(found, 2).rows] == [
        "0.92 at 1.08", "1.34 at 1.68", "not reached", "not reached",
    ]  # fmt: skip
    _, errors = left_out_table(found)
    assert len(errors) == 2
    # Gold that only falls has its fit's peak below the nearest distance.
    down = [
        {**row, "val/gold": 1 + Law("rl", -2.0, 0.5).gain(math.sqrt(row["val/kl_per_response"]))}
        for row in RESULTS[0].rows[1:]
    ]
    fallen = pursuits([replace(RESULTS[0], rows=down)], MODELS)
    assert fallen[0].law.peak is not None
    assert laws_table(fallen, 1).rows[0][6] == "not reached"


def test_the_page_has_the_law_first(tmp_path):
    study = Study("law", "About.", RESULTS, ("val/gold",), (), reward_models=MODELS)
    page, text = write_study(study, tmp_path)
    told = text.read_text()
    assert "The law explains at least 95 % of the variance of gold in 8 of 8 runs." in told
    assert "4 of 4 peaks of a size left out are predicted within 15 % of their height." in told
    assert told.index("## The law of over-optimisation") < told.index("## Settings")
    # 0.3 for ten times the size, in both seeds alike
    assert "| PPO, 500 pairs | 4 | 0.30 (0.30 to 0.30) | -0.0500 (-0.0500 to -0.0500) | 2 |" in told
    assert page.read_text().count("<svg") == 1


def test_a_dot_of_the_chart_is_a_mean_over_all_seeds_of_its_line():
    # The second seed is far below the first and ends early: what is left must not rise there.
    few = [replace(r, rows=r.rows[:5]) if r.seed == 2 else r for r in RESULTS]
    found = [one for one in pursuits(few, MODELS) if one.row == "ppo_tiny"]
    assert [len(one.gold) for one in found] == [6, 4]
    assert [x for x, _ in _dots(found)[0]] == pytest.approx([0.0, 0.5, 1.0, 2.0])
    assert [x for x, _ in _dots(found[:1])[0]] == pytest.approx([0.0, 0.5, 1.0, 2.0, 3.0, 5.0])
    apart = replace(found[1], gold=[Point(9.0, 1.0)])
    assert _dots([found[0], apart]) == ([], [])


def test_the_chart_says_that_the_kl_of_the_best_of_n_is_a_bound():
    models = {f"best_{n}": RewardModel(size, 500, "best") for n, size in SIZES.items()}
    results = [
        run(row, 1, [], setting=f"n={n}", metrics=measured(math.log(n), 9 + n / 10))
        for n in (2, 4, 8)
        for row in models
    ]
    *_, (lead, _) = overoptimization(results, models)
    assert "upper bound" in lead
    *_, (lead, _) = overoptimization(RESULTS, MODELS)
    assert "upper bound" not in lead
