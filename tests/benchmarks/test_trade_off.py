"""Gain at equal KL: interpolation against numbers by hand, intervals against simulations."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.studies.trade_off import (
    Measured,
    difference,
    gain_at,
    mean_gain,
    over_seeds,
    prompt_error,
)
from rlhf_lightning.functional.statistics import wilson_interval

CURVE = [Measured(0.3, 0.9, 0.03), Measured(0.1, 0.6, 0.01), Measured(0.2, 0.8, 0.02)]


def test_gain_is_interpolated_between_the_neighbours_in_kl_and_not_beyond_the_ends():
    assert gain_at(CURVE, 0.125) == pytest.approx((0.125, 0.65, 0.0125), rel=1e-12)
    assert gain_at(CURVE, 0.3) == pytest.approx((0.3, 0.9, 0.03), rel=1e-12)
    assert gain_at(CURVE, 0.099) is None
    assert gain_at(CURVE, 0.301) is None
    assert gain_at(CURVE[:1], 0.3) is None  # one setting is no curve


def test_the_mean_gain_is_the_area_under_the_curve_over_its_width():
    # (0.1 * (0.6 + 0.8) / 2 + 0.1 * (0.8 + 0.9) / 2) / 0.2
    assert mean_gain(CURVE, 0.1, 0.3).gain == pytest.approx(0.775, rel=1e-12)
    # From 0.15 (0.7) over 0.2 (0.8) to 0.25 (0.85).
    assert mean_gain(CURVE, 0.15, 0.25).gain == pytest.approx(0.7875, rel=1e-12)
    assert mean_gain(CURVE, 0.1, 0.3).sd == pytest.approx(0.02, rel=1e-12)
    assert mean_gain(CURVE, 0.05, 0.3) is None
    assert mean_gain(CURVE, 0.2, 0.2) is None


def test_a_difference_adds_the_variances_and_keeps_its_sign():
    found = difference(Measured(0.1, 0.8, 0.03), Measured(0.1, 0.6, 0.04))
    assert found == pytest.approx((0.1, 0.2, 0.05), rel=1e-12)
    assert over_seeds([found], same_prompts=True).excludes_zero
    assert not over_seeds([found._replace(gain=0.05)], same_prompts=True).excludes_zero


@pytest.mark.parametrize("same_prompts", [False, True])
def test_the_interval_of_a_difference_covers_the_truth_as_often_as_it_says(same_prompts):
    """Two objectives, three seeds, 200 prompts; each prompt has a chance of its own to be won."""
    rng, num_prompts, covered, tries = np.random.default_rng(1), 200, 0, 1500
    for _ in range(tries):
        values = []
        for seed in range(3):
            if seed == 0 or not same_prompts:
                ease = rng.normal(0, 0.15, size=num_prompts)
                own = rng.normal(0, 0.1, size=(2, num_prompts))  # what each makes of a prompt
            sides = []
            for mean, part in zip((0.55, 0.6), own, strict=True):
                luck = rng.normal(0, 0.02)  # of the seed
                wins = rng.random(num_prompts) < np.clip(mean + luck + ease + part, 0, 1)
                bounds = wilson_interval(float(wins.sum()), num_prompts, confidence=0.95)
                sides.append(Measured(0.1, float(wins.mean()), prompt_error(*bounds)))
            values.append(difference(*sides))
        found = over_seeds(values, same_prompts=same_prompts)
        covered += found.low <= -0.05 <= found.high
    assert covered / tries >= 0.94
    # Where seeds share prompts, the luck of the answers counts in both parts.
    assert same_prompts or covered / tries <= 0.99
