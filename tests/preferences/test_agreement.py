"""Agreement and kappa against numbers worked out by hand, statsmodels, and counting pairs."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from statsmodels.stats import inter_rater

from rlhf_lightning.preferences.agreement import (
    cohen_kappa,
    collect_votes,
    fleiss_kappa,
    majority,
    position_bias,
    raw_agreement,
)
from tests.builders.labels import TEXTBOOK, label


def test_fleiss_kappa_of_the_textbook_example_is_0_210() -> None:
    assert raw_agreement(TEXTBOOK) == pytest.approx(0.37802197802197803, rel=1e-12)
    assert fleiss_kappa(TEXTBOOK) == pytest.approx(0.20993070442195522, rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_fleiss_kappa_equals_that_of_statsmodels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    raters, categories = rng.integers(2, 8), rng.integers(2, 6)
    counts = rng.multinomial(raters, rng.dirichlet(np.ones(categories)), size=40)
    assert fleiss_kappa(counts) == pytest.approx(inter_rater.fleiss_kappa(counts), rel=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_cohen_kappa_equals_that_of_statsmodels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = rng.integers(0, 3, 50), rng.integers(0, 3, 50)
    second = np.where(rng.random(50) < 0.5, first, second)
    table = np.zeros((3, 3))
    for a, b in zip(first, second, strict=True):
        table[a, b] += 1
    expected = inter_rater.cohens_kappa(table).kappa
    assert cohen_kappa(first, second) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_unequal_numbers_of_votes_equal_counting_pair_by_pair(seed: int) -> None:
    rng = np.random.default_rng(seed)
    items = [rng.integers(0, 3, rng.integers(1, 6)).tolist() for _ in range(30)]
    counts = np.array([[votes.count(k) for k in range(3)] for votes in items])
    several = [votes for votes in items if len(votes) > 1]
    shares = []
    for votes in several:
        pairs = list(combinations(votes, 2))
        shares.append(sum(a == b for a, b in pairs) / len(pairs))
    observed = sum(shares) / len(shares)
    pooled = [vote for votes in several for vote in votes]
    chance = sum((pooled.count(k) / len(pooled)) ** 2 for k in range(3))
    assert raw_agreement(counts) == pytest.approx(observed, rel=1e-12)
    assert fleiss_kappa(counts) == pytest.approx((observed - chance) / (1 - chance), rel=1e-12)


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
    votes = collect_votes(labels)
    assert votes.items == ("p", "q")
    assert votes.annotators == ("ada", "bob")

    assert votes.counts.tolist() == [[0, 1, 0], [0, 0, 2]]

    assert votes.cells.tolist() == [[0, 0, 1], [1, 1, 2], [1, 0, 2]]


def test_a_majority_is_alone_at_the_top() -> None:
    def most(*choices: str) -> str | None:
        return majority([label("p", str(i), choice) for i, choice in enumerate(choices)])

    assert most("first", "first", "second") == "first"
    assert most("first", "second") is None
    assert most() is None
    assert most("first", "second", "tie", "both_bad") == "tie"


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
