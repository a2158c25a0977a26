"""Gain at equal KL: interpolation and its errors against numbers by hand."""

from __future__ import annotations

import pytest

from benchmarks.studies.trade_off import Measured, difference, gain_at, mean_gain, over_seeds

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
