"""Importance weights against the sampler: values of the vectors, and what they leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional import off_policy
from rlhf_lightning.functional.losses import ppo_policy_loss
from rlhf_lightning.functional.off_policy import (
    masked_weights,
    mismatch,
    mismatch_sums,
    sequence_ratios,
    truncated_weights,
)
from tests.vectors.cases import DTYPES, Case, assert_matches, case, cases

PLAIN: dict[str, Any] = {"cliprange_high": None, "dual_clip": None}


def truncated(case: Case, arguments: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
    weights = off_policy.truncated_weights(*arguments, cap=case.inputs["cap"])
    logprobs = case.tensor("logprobs", arguments[0].dtype).requires_grad_()
    # One advantage a row, weighed token by token.
    loss = ppo_policy_loss(
        logprobs,
        case.tensor("old_logprobs", logprobs.dtype),
        case.tensor("advantages", logprobs.dtype).unsqueeze(-1) * weights,
        case.mask(),
        cliprange=case.inputs["cliprange"],
        **PLAIN,
        num_tokens=None,
    ).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return {"weights": weights, "loss": loss.detach(), "grad_logprobs": gradient}


def masked(case: Case, arguments: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
    weights = off_policy.masked_weights(
        *arguments, low=case.inputs["low"], high=case.inputs["high"]
    )
    ratios = off_policy.sequence_ratios(*arguments)
    return {"weights": weights, "keep": (weights > 0).any(-1), "sequence_ratio": ratios}


def measures(case: Case, arguments: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
    old, sampler, mask = arguments
    # Two ranks with another number of rows and tokens each.
    parts = [mismatch_sums(old[r], sampler[r], mask[r]) for r in (slice(0, 1), slice(1, None))]
    return mismatch(parts)._asdict()


@pytest.mark.parametrize("case", cases("off_policy"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_mismatch_match_the_vectors(case: Case, dtype: torch.dtype):
    old, sampler = case.tensor("old_logprobs", dtype), case.tensor("sampler_logprobs", dtype)
    function = truncated if "cap" in case.inputs else masked if "low" in case.inputs else measures
    # The gradients of the vectors are central differences.
    computed = function(case, (old, sampler, case.mask()))
    assert_matches(case, computed, dtype, of_key={"grad_logprobs": 1e-6})


@pytest.mark.parametrize(
    "weights",
    [
        lambda *x: truncated_weights(*x, cap=1.1),
        lambda *x: masked_weights(*x, low=0.9, high=1.1),
        sequence_ratios,
    ],
)
def test_weights_carry_no_graph_and_are_1_where_the_sampler_is_the_trainer(weights):
    vector = case("off_policy", "token_truncated_1.1")
    mask = vector.mask()
    for dtype in (torch.float32, torch.float64):
        old = vector.tensor("old_logprobs", dtype).requires_grad_()
        assert not weights(old, vector.tensor("sampler_logprobs", dtype), mask).requires_grad
        same = weights(old, old.detach().clone(), mask)
        on_mask = same if same.dim() == 1 else same[mask]
        assert torch.equal(on_mask, torch.ones_like(on_mask))
        assert same.dim() == 1 or (same[~mask] == 0).all()
    no_gap = mismatch([mismatch_sums(old.detach(), old.detach(), mask)])
    assert no_gap == (0, 0, 0, 0, 1)


def test_what_stands_off_the_mask_and_a_gap_that_overflows_make_no_weight_infinite():
    old = torch.tensor([[0.0, -1000.0, torch.nan], [-1.0, torch.inf, -torch.inf]])
    sampler = torch.tensor([[-1000.0, 0.0, 1.0], [-1.0, 0.0, torch.nan]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    by_token = truncated_weights(old, sampler, mask, cap=3.0)
    assert by_token[0].tolist() == pytest.approx([3.0, 0.0, 0.0], abs=1e-8)
    assert by_token[1].tolist() == [1.0, 0.0, 0.0]
    by_row = masked_weights(old, sampler, mask, low=0.5, high=2.0)
    assert by_row.tolist() == [[1, 1, 0], [1, 0, 0]]
    found = mismatch([mismatch_sums(old, sampler, mask)])
    assert found.max_abs == 1000
    assert found.mean_abs == pytest.approx(2000 / 3)
    assert mismatch([mismatch_sums(old, sampler, torch.zeros_like(mask))]) is None
