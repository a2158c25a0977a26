"""Importance weights against the sampler: values of the vectors, and which mistakes they notice."""

from __future__ import annotations

from collections.abc import Callable
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


def surrogate(
    case: Case, logprobs: Tensor, weights: Tensor, num_tokens: float | None = None
) -> Tensor:
    """Return the clipped surrogate with one advantage a row, weighed token by token."""
    advantages = case.tensor("advantages", logprobs.dtype).unsqueeze(-1) * weights
    return ppo_policy_loss(
        logprobs,
        case.tensor("old_logprobs", logprobs.dtype),
        advantages,
        case.mask(),
        cliprange=case.inputs["cliprange"],
        **PLAIN,
        num_tokens=num_tokens,
    ).loss


def truncated(case: Case, arguments: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
    weights = off_policy.truncated_weights(*arguments, cap=case.inputs["cap"])
    logprobs = case.tensor("logprobs", arguments[0].dtype).requires_grad_()
    loss = surrogate(case, logprobs, weights)
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


CASES = {"truncated": "token_truncated_1.1", "masked": "sequence_masked_0.9_1.1"}


def swapped(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def mutant(old: Tensor, sampler: Tensor, mask: Tensor, **options: Any) -> Tensor:
        return function(sampler, old, mask, **options)

    return mutant


def outside(old: Tensor, sampler: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    ratios = sequence_ratios(old, sampler, mask).unsqueeze(-1)
    return torch.where(mask & ((ratios < low) | (ratios > high)), ratios, 0)


def one_inside(*arguments: Tensor, low: float, high: float) -> Tensor:
    return (masked_weights(*arguments, low=low, high=high) > 0).double()


def clipped_below(*arguments: Tensor, cap: float) -> Tensor:
    mask = arguments[2]
    return torch.where(mask, truncated_weights(*arguments, cap=cap).clamp(min=1 / cap), 0)


def mean_ratio(old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    return sequence_ratios(old, sampler, mask) ** (1 / mask.sum(-1))


MUTANTS: dict[str, tuple[str, str, Callable[..., Tensor]]] = {
    "sampler over old, by token": ("truncated", "truncated_weights", swapped(truncated_weights)),
    "sampler over old, by row": ("masked", "sequence_ratios", swapped(sequence_ratios)),
    "a weight with a lower bound": ("truncated", "truncated_weights", clipped_below),
    "the other side of the band": ("masked", "masked_weights", outside),
    "weight 1 inside the band": ("masked", "masked_weights", one_inside),
    "the mean of a row in place of the sum": ("masked", "sequence_ratios", mean_ratio),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_vectors_notice(name: str, monkeypatch: pytest.MonkeyPatch):
    kind, attribute, mutant = MUTANTS[name]
    vector = case("off_policy", CASES[kind])
    test_weights_and_mismatch_match_the_vectors(vector, torch.float64)
    monkeypatch.setattr(off_policy, attribute, mutant)
    with pytest.raises(AssertionError):
        test_weights_and_mismatch_match_the_vectors(vector, torch.float64)


def test_the_vectors_notice_another_divisor_and_a_weight_that_is_not_detached():
    vector = case("off_policy", "token_truncated_2")
    mask = vector.mask()
    old, sampler = (vector.tensor(f"{n}_logprobs", torch.float64) for n in ("old", "sampler"))
    weights = truncated_weights(old, sampler, mask, cap=vector.inputs["cap"])
    logprobs = vector.tensor("logprobs", torch.float64).requires_grad_()
    expected = torch.tensor(vector.expected["grad_logprobs"], dtype=torch.float64)

    def gradient(weights: Tensor, num_tokens: float | None = None) -> Tensor:
        loss = surrogate(vector, logprobs, weights, num_tokens)
        return torch.autograd.grad(loss, logprobs)[0]

    torch.testing.assert_close(gradient(weights), expected, rtol=1e-6, atol=1e-6)
    # Tokens counted by their weights, as a self-normalised estimate would.
    assert (gradient(weights, float(weights.sum())) - expected).abs().max() > 1e-4
    # The old log-probabilities are those of the policy in training at its first step: a weight
    # made of them with a graph has a gradient of its own.
    attached = torch.where(mask, (logprobs - logprobs.detach() + old - sampler).exp(), 0)
    capped = attached.clamp(max=vector.inputs["cap"])
    torch.testing.assert_close(capped.detach(), weights)
    assert (gradient(capped) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    "weights",
    [
        lambda *x: truncated_weights(*x, cap=1.1),
        lambda *x: masked_weights(*x, low=0.9, high=1.1),
        sequence_ratios,
    ],
)
def test_weights_carry_no_graph_and_are_1_where_the_sampler_is_the_trainer(weights):
    vector = case("off_policy", CASES["truncated"])
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
