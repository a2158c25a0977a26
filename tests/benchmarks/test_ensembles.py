"""Curves of gold and proxy from recorded runs; the runs themselves are made by hand."""

from __future__ import annotations

import pytest

from benchmarks.studies.ensembles.curves import (
    STEP,
    at_distance,
    binned,
    points,
    report,
    t_interval,
)
from benchmarks.studies.ensembles.plan import (
    ENSEMBLES,
    SEEDS,
    conditions,
    reward_name,
)


def recorded(condition: str, seed: int, *, gold_falls: float) -> dict:
    """A run whose proxy rises by 1 a unit of sqrt(KL), and whose gold turns at 1.5."""
    curve = []
    for step in range(60):
        distance = step / 20
        gold = distance - gold_falls * max(distance - 1.5, 0)
        curve.append({"kl": distance**2, "proxy": 0.3 + distance, "gold": 1 + 2 * gold})
    sft = {"proxy_mean": 0.3, "proxy_std": 1.0, "gold_mean": 1.0, "gold_std": 2.0}
    return {"condition": condition, "seed": seed, "curve": curve, "sft": sft}


def test_rewards_are_gains_over_sft_in_its_standard_deviations():
    found = points(recorded("single", 1, gold_falls=0.0))
    assert found[0] == pytest.approx((0, 0, 0))
    assert found[-1] == pytest.approx((2.95, 2.95, 2.95))


def test_a_bin_is_the_mean_of_the_iterations_inside_it():
    inside = binned([(0.01, 1.0, 0.0), (0.02, 3.0, 1.0), (STEP + 0.01, 5.0, 5.0)])
    assert inside == {0: pytest.approx((0.015, 2.0, 0.5)), 1: (STEP + 0.01, 5.0, 5.0)}


def test_a_distance_is_passed_first_between_two_iterations_and_not_on_the_way_back():
    run = [(0.0, 0.0, 0.0), (2.0, 1.0, -1.0), (0.5, 9.0, 9.0), (2.0, 8.0, 8.0)]
    assert at_distance(run, 1.5) == pytest.approx((1.5, 0.75, -0.75))
    assert at_distance(run, 2.5) is None


def test_the_report_finds_by_how_much_ensembles_are_nearer(tmp_path):
    runs = [recorded("single", seed, gold_falls=2.0) for seed in (1, 2, 3)]
    runs += [recorded(how, s, gold_falls=1.0 + 0.1 * s) for how in ENSEMBLES for s in (1, 2, 3)]
    text = report(runs, tmp_path)
    assert "seeds [1, 2, 3]; 8 distances sqrt(KL) from 1 to 2.75" in text
    # Gold falls by 0.7 to 0.9 less a unit beyond 1.5: the gap is smaller by as much.
    row = next(line for line in text.splitlines() if line.startswith("| minimum"))
    less = row.split("|")[5].split()
    assert 0.3 < float(less[0]) < 0.5
    assert 0 < float(less[1].strip("()")) < float(less[0])
    assert (tmp_path / "ensembles.png").read_bytes().startswith(b"\x89PNG")


def test_the_interval_of_four_pairs_is_students():
    # Mean 0.35, standard deviation 0.20817; the 0.975 quantile of t with 3 degrees is 3.18245.
    low, high = t_interval([0.1, 0.3, 0.4, 0.6])
    assert (low, high) == pytest.approx((0.35 - 0.33125, 0.35 + 0.33125), abs=1e-4)
    assert t_interval([0.5, 0.5]) == (0.5, 0.5)


def test_every_run_has_the_reward_models_it_is_paid_by():
    made = {reward_name(member) for member in SEEDS}
    wanted = {name for seed in SEEDS for c in conditions(seed) for name in c.rewards}
    assert wanted == made
    assert [c.name for c in conditions(2)] == ["single", *ENSEMBLES]
