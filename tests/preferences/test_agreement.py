"""Agreement and kappa against numbers worked out by hand, statsmodels, and counting pairs."""

from __future__ import annotations

import numpy as np
import pytest
from statsmodels.stats import inter_rater

from rlhf_lightning.preferences.agreement import (
    cohen_kappa,
    fleiss_kappa,
    position_bias,
    raw_agreement,
    vote_counts,
)
from tests.builders.labels import TEXTBOOK, label


def test_fleiss_kappa_of_the_textbook_example_is_0_210() -> None:
    assert raw_agreement(TEXTBOOK) == pytest.approx(0.37802197802197803, rel=1e-12)
    assert fleiss_kappa(TEXTBOOK) == pytest.approx(0.20993070442195522, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_fleiss_kappa_equals_that_of_statsmodels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    raters, categories = rng.integers(2, 8), rng.integers(2, 6)
    counts = rng.multinomial(raters, rng.dirichlet(np.ones(categories)), size=40)
    assert fleiss_kappa(counts) == pytest.approx(inter_rater.fleiss_kappa(counts), rel=1e-10)


@pytest.mark.parametrize("seed", range(2))
def test_cohen_kappa_equals_that_of_statsmodels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = rng.integers(0, 3, 50), rng.integers(0, 3, 50)
    second = np.where(rng.random(50) < 0.5, first, second)
    table = np.zeros((3, 3))
    for a, b in zip(first, second, strict=True):
        table[a, b] += 1
    expected = inter_rater.cohens_kappa(table).kappa
    assert cohen_kappa(first, second) == pytest.approx(expected, rel=1e-10)


def test_what_cannot_be_measured_is_nan() -> None:
    assert np.isnan(raw_agreement(np.array([[1, 0], [0, 1]])))
    assert np.isnan(fleiss_kappa(np.array([[1, 0]])))
    assert np.isnan(fleiss_kappa(np.array([[3, 0], [2, 0]])))
    assert np.isnan(cohen_kappa([1, 1], [1, 1]))


def test_votes_are_one_an_annotator_and_pair_and_skips_are_none() -> None:
    labels = [
        label("p", "ada", "first"),
        label("p", "bob", "skip"),
        label("q", "bob", "both_bad"),
        label("p", "ada", "second"),
        label("q", "ada", "tie"),
    ]
    assert vote_counts(labels).tolist() == [[0, 1, 0], [0, 0, 2]]
    assert vote_counts([]).shape == (0, 3)


def test_position_bias_counts_what_was_shown_first_not_the_first_of_the_pair() -> None:
    labels = [
        label("a", "x", "first", order="first"),
        label("b", "x", "second", order="second"),
        label("c", "x", "first", order="second"),
        label("d", "x", "second", order="second"),
        label("e", "x", "tie"),
    ]
    bias = position_bias(labels)
    assert (bias.value, bias.num) == (0.75, 4)
    assert bias.low == pytest.approx(0.3006, abs=1e-4)
    assert bias.high == pytest.approx(0.9544, abs=1e-4)
    assert np.isnan(position_bias(labels[-1:]).value)
