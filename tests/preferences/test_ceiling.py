"""The ceiling against closed forms, and against people whose noise is known."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from rlhf_lightning.preferences.reliability import (
    estimate_ceiling,
    expected_correct,
    fit_shape,
    single_ceiling,
)
from tests.builders.labels import beta_tally


def test_the_ceiling_of_even_opinions_is_three_quarters() -> None:
    # p uniform: E[max(p, 1 - p)] = 3/4.
    assert single_ceiling(1.0) == pytest.approx(0.75, rel=1e-12)


def test_the_ceiling_by_hand() -> None:
    # 6 items of votes 2:0 and 2 of 1:1: agreement 3/4.
    found = estimate_ceiling({(2, 0): 4, (0, 2): 2, (1, 1): 2, (1, 0): 50})
    assert found is not None
    assert found["num_items"] == 8
    # Agreement of two votes under Beta(a, a) is (a + 1) / (2 a + 1): a is 1/2, where
    # E[max(p, 1 - p)] = 1/2 + 1/pi, the mean of an arcsine law's upper half.
    assert found["shape"] == pytest.approx(0.5, rel=1e-4)
    assert found["single"] == pytest.approx(0.5 + 1 / math.pi, abs=1e-4)


@pytest.mark.parametrize(("shape", "num_votes"), [(0.3, 3), (1.0, 5), (4.0, 2)])
def test_the_noise_of_people_is_recovered(shape: float, num_votes: int) -> None:
    found = estimate_ceiling(beta_tally(shape, 6000, num_votes, seed=1))
    assert found is not None
    rng = np.random.default_rng(2)
    p = rng.beta(shape, shape, 200_000)
    truth = float(np.maximum(p, 1 - p).mean())
    assert found["single"] == pytest.approx(truth, abs=0.012)
    assert found["single_low"] <= truth <= found["single_high"]


def test_the_expected_share_of_right_labels_is_that_of_the_simulation() -> None:
    rng = np.random.default_rng(3)
    p = rng.beta(0.6, 0.6, 20_000)
    first = rng.binomial(3, p)
    tally = Counter(zip(first.tolist(), (3 - first).tolist(), strict=True))
    right = (first > 1.5) == (p > 0.5)
    assert expected_correct(tally, fit_shape(tally)) == pytest.approx(right.mean(), abs=0.01)


def test_a_few_people_who_agree_are_not_sure_that_all_do() -> None:
    few = estimate_ceiling({(2, 0): 6, (0, 2): 4})
    assert few is not None
    # Two votes agree with probability (a + 1) / (2 a + 1), whose log is at least -3.84 / 20.
    agreement = math.exp(-3.8414588 / 20)
    shape = (1 - agreement) / (2 * agreement - 1)
    assert few["single_low"] == pytest.approx(single_ceiling(shape), abs=2e-3)
    assert few["single_low"] < 0.9 < 0.99 < few["single"] <= few["single_high"]


@pytest.mark.parametrize(("shape", "count", "num_votes"), [(0.1, 10, 2), (0.5, 20, 3), (10, 10, 5)])
def test_the_interval_of_the_ceiling_holds_the_truth(shape, count, num_votes) -> None:
    truth = single_ceiling(shape)
    found = [estimate_ceiling(beta_tally(shape, count, num_votes, seed=s)) for s in range(60)]
    held = [f is not None and f["single_low"] <= truth <= f["single_high"] for f in found]
    assert np.mean(held) >= 0.88  # a bootstrap's held 75 to 85 %


def test_what_cannot_be_estimated_is_said() -> None:
    assert estimate_ceiling({(1, 0): 10}) is None
    assert math.isnan(expected_correct({(1, 1): 3}, 1.0))
