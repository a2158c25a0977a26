"""Trust regions by mask: values of the vectors, and which mistakes they notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional import surrogates
from rlhf_lightning.functional.losses import PolicyLoss, cispo_policy_loss, masked_policy_loss
from rlhf_lightning.functional.surrogates import MaskedProbability, MaskedRatio
from tests.vectors.cases import DTYPES, Case, assert_matches, case, cases

CLASSES = {"ratio": MaskedRatio, "total_variation": MaskedProbability}
ON_THE_BOUND = "boundary_inside"  # by 1e-12, which float32 does not hold


def arguments(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs, base, advantages = (
        case.tensor(name, dtype) for name in ("logprobs", "base_logprobs", "advantages")
    )
    return logprobs, base, advantages, case.mask()


def computed(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    logprobs, base, advantages, mask = arguments(case, dtype)
    bounds = {"cliprange": case.inputs["low"], "cliprange_high": case.inputs["high"]}
    loss = CLASSES[case.inputs["kind"]](**bounds)
    logprobs.requires_grad_()
    result: PolicyLoss = loss(logprobs, base, advantages, mask, num_tokens=None)
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    return {
        "loss": result.loss.detach(),
        "grad_logprobs": gradient,
        "kept_fraction": 1 - result.clipfrac,
        "keep": (gradient != 0).to(dtype),
    }


@pytest.mark.parametrize("case", cases("trust_region"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_losses_match_the_vectors(case: Case, dtype: torch.dtype):
    if case.name == ON_THE_BOUND and dtype == torch.float32:
        pytest.skip("the case lies within 1e-12 of the bound")
    assert_matches(case, computed(case, dtype), dtype)


def loss_of(case: Case, *, swapped: bool = False, sign: float = 1.0, **changes: Any) -> float:
    logprobs, base, advantages, mask = arguments(case, torch.float64)
    if swapped:
        logprobs, base = base, logprobs
    given: dict[str, Any] = {
        "kind": "ratio" if case.inputs["kind"] == "ratio" else "probability",
        "cliprange": case.inputs["low"],
        "cliprange_high": case.inputs["high"],
        "num_tokens": None,
    }
    return masked_policy_loss(
        logprobs, base, sign * advantages, mask, **given | changes
    ).loss.item()


NUM_KEPT = sum(map(sum, case("trust_region", "sao_0.2_0.28").expected["keep"]))
MUTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "base over policy": ("sao_0.2_0.28", {"swapped": True}),
    "bounds swapped": ("dppo_tv_0.05_0.1", {"cliprange": 0.1, "cliprange_high": 0.05}),
    "one bound for both": ("dppo_tv_0.05_0.1", {"cliprange_high": None}),
    "the other kind": ("dppo_tv_0.2", {"kind": "ratio"}),
    "mean over the tokens kept": ("sao_0.2_0.28", {"num_tokens": NUM_KEPT}),
    "advantages flipped": ("sao_0.8_3", {"sign": -1.0}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_vectors_notice(name: str):
    which, changes = MUTANTS[name]
    vector = case("trust_region", which)
    expected = vector.expected["loss"]
    assert loss_of(vector) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert abs(loss_of(vector, **changes) - expected) > 1e-3


def test_the_vectors_notice_tokens_that_are_clipped_and_not_left_out():
    vector = case("trust_region", "sao_0.2_0.28")
    how = {"cliprange": 0.2, "cliprange_high": 0.28, "num_tokens": None}
    loss = cispo_policy_loss(*arguments(vector, torch.float64), **how).loss.item()
    assert abs(loss - vector.expected["loss"]) > 1e-3


def test_a_token_on_the_bound_is_inside_and_one_that_left_teaches_nothing_either_way():
    # Powers of two: the ratios are exact.
    base = torch.tensor([[0.5, 0.5, 0.25, 0.25]], dtype=torch.float64).log()
    logprobs = torch.tensor([[0.25, 0.75, 0.75, 0.0625]], dtype=torch.float64).log()
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    mask = torch.ones(1, 4, dtype=torch.bool)
    for loss in (
        MaskedRatio(cliprange=0.5, cliprange_high=0.5 + 1e-12),
        MaskedProbability(cliprange=0.25, cliprange_high=0.25 + 1e-12),
    ):
        leaf = logprobs.clone().requires_grad_()
        result = loss(leaf, base, advantages, mask, num_tokens=None)
        kept = torch.autograd.grad(result.loss, leaf)[0] != 0
        # The last token fell by 0.1875: far by its ratio of 1/4, not far by its probability.
        by_probability = isinstance(loss, MaskedProbability)
        assert kept.tolist() == [[True, True, False, by_probability]]
        assert result.clipfrac == (1 if by_probability else 2) / 4


def test_one_bound_is_taken_for_both_and_an_unknown_kind_is_named():
    vector = case("trust_region", "dppo_tv_0.2")
    tensors = arguments(vector, torch.float64)
    one = surrogates.MaskedProbability(cliprange=0.2)(*tensors, num_tokens=None)
    assert one.loss.item() == pytest.approx(vector.expected["loss"], rel=1e-9)
    with pytest.raises(ValueError, match="kind='kl' must be 'ratio' or 'probability'"):
        loss_of(vector, kind="kl")
