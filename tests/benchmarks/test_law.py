"""Fits of the over-optimisation law, on points whose coefficients are known."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest

from benchmarks.studies.law import Law, Point, fit_law, left_out, over_sizes

DISTANCES = np.linspace(0, 6, 25)


def points(law: Law, noise: float = 0.0) -> list[Point]:
    drawn = np.random.default_rng(0).normal(0, noise, len(DISTANCES))
    return [Point(float(d), law.gain(float(d)) + e) for d, e in zip(DISTANCES, drawn, strict=True)]


@pytest.mark.parametrize("way", ["rl", "best_of_n"])
def test_a_fit_finds_the_coefficients_that_made_the_points(way):
    made = Law(way, 1.2, 0.4)
    found = fit_law(way, points(made))
    assert (found.a, found.b, found.r2) == pytest.approx((1.2, 0.4, 1.0))
    near = fit_law(way, points(made, noise=0.05))
    assert near.a == pytest.approx(1.2, abs=0.1)
    assert 0.5 < near.r2 < 1


def test_a_size_left_out_is_predicted_from_the_others_alone():
    sizes = [1_000, 10_000, 100_000, 1_000_000]
    laws = {
        size: [Law("rl", 0.2 * math.log10(size) + seed, 0.9 - 0.1 * math.log10(size))
               for seed in (-0.1, 0.1)]
        for size in sizes
    }  # fmt: skip
    assert over_sizes({s: fmean(law.a for law in laws[s]) for s in sizes}).per_decade == (
        pytest.approx(0.2)
    )
    wrong = laws | {10_000: [Law("rl", 50.0, 50.0)]}
    for known in (laws, wrong):
        found = left_out(known, 10_000)
        assert (found.a, found.b) == pytest.approx((0.8, 0.5))
