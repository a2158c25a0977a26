import math

import pytest
import torch

from rlhf_lightning.functional.diversity import distinct_n, self_bleu
from rlhf_lightning.functional.statistics import (
    effective_number,
    explained_variance,
    interval_over_groups,
    wilson_interval,
)
from tests.vectors.cases import Case, assert_matches, cases


@pytest.mark.parametrize("case", cases("diversity"))
def test_distinct_n_matches_the_vectors(case: Case):
    sequences, n = case.inputs["sequences"], case.inputs["n"]
    per_sample = [distinct_n([sequence], n=n) for sequence in sequences]
    computed = {
        "corpus": distinct_n(sequences, n=n),
        "per_sample": per_sample,
        "per_sample_mean": sum(per_sample) / max(len(per_sample), 1),
    }
    assert_matches(case, computed, torch.float64)


@pytest.mark.parametrize("case", cases("self_bleu"))
def test_self_bleu_is_that_of_another_library(case: Case):
    assert_matches(case, {"self_bleu": self_bleu(**case.inputs, seed=0)}, torch.float64)


@pytest.mark.parametrize("case", cases("effective_number"))
def test_effective_number_and_interval_over_groups_match_the_vectors(case: Case):
    sizes, hits = case.inputs["sizes"], case.inputs["hits"]
    confidence = case.inputs["confidence"]
    trials = [t < hit for size, hit in zip(sizes, hits, strict=True) for t in range(size)]
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    computed = {
        "effective_number": effective_number(hits, sizes, confidence=confidence),
        "interval": interval_over_groups(trials, groups, confidence=confidence),
    }
    assert_matches(case, computed, torch.float64)


def test_distinct_n_takes_words_as_well_as_ids():
    assert distinct_n([["a", "b", "a", "b"]], n=2) == pytest.approx(2 / 3)


def test_distinct_n_refuses_an_empty_gram():
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        distinct_n([[1]], n=0)


def test_wilson_interval_stays_inside_zero_and_one():
    low, high = wilson_interval(0, 5, confidence=0.95)
    assert low == pytest.approx(0, abs=1e-12)
    assert 0.4 < high < 0.5
    assert all(math.isnan(end) for end in wilson_interval(0, 0, confidence=0.95))


@pytest.mark.parametrize(
    ("successes", "n", "confidence", "message"),
    [
        (1, 5, 0.0, "confidence=0.0 must be above 0"),
        (1, 5, 95, "confidence=95 must be above 0 and below 1"),
        (6, 5, 0.95, "successes=6 must be between 0 and n=5"),
        (-1, 5, 0.95, "successes=-1 must be between 0 and n=5"),
    ],
)
def test_wilson_interval_names_wrong_arguments(successes, n, confidence, message):
    with pytest.raises(ValueError, match=message):
        wilson_interval(successes, n, confidence=confidence)


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one():
    returns = torch.randn(4, 6)
    mask = torch.rand(4, 6) < 0.8
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(returns + 3, returns, mask).item() == pytest.approx(1, abs=1e-5)
    constant = explained_variance(torch.full((4, 6), 7.0), returns, mask)
    assert constant.item() == pytest.approx(0, abs=1e-5)
    assert explained_variance(-returns, returns, mask) < -2


@pytest.mark.parametrize("value", [0.0, 0.1, 1e4])
def test_explained_variance_is_undefined_for_returns_that_do_not_vary(value: float):
    mask = torch.ones(3, 7, dtype=torch.bool)
    assert explained_variance(torch.randn(3, 7), torch.full((3, 7), value), mask).isnan()
    assert explained_variance(torch.randn(3, 7), torch.randn(3, 7), ~mask).isnan()


def test_what_rounding_leaves_of_equal_returns_is_no_variance():
    returns = torch.tensor([[1.0, 1.0 + 2**-23]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert explained_variance(torch.randn(1, 2), returns, mask).isnan()
    tiny = torch.tensor(1e-15)  # as moments over ranks have it
    found = explained_variance(
        torch.randn(1, 2), torch.ones(1, 2), mask, residual_var=tiny, total_var=tiny
    )
    assert found.isnan()
