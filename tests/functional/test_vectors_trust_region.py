"""Trust regions by mask: values of the vectors, and tokens on the bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional import surrogates
from rlhf_lightning.functional.losses import PolicyLoss, masked_policy_loss
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
        masked_policy_loss(
            *arguments(vector, torch.float64),
            kind="kl", cliprange=0.2, cliprange_high=None, num_tokens=None,
        )  # fmt: skip
