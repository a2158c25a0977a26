import math
from typing import Any, Literal

import pytest
import torch

from rlhf_lightning.functional.losses import (
    causal_lm_loss,
    clipped_value_loss,
    gspo_policy_loss,
    loss_divisor,
    ppo_policy_loss,
)
from rlhf_lightning.functional.preference_losses import pairwise_reward_loss
from rlhf_lightning.functional.statistics import explained_variance
from tests.vectors.cases import DTYPES, Case, assert_matches, cases

PLAIN_PAIRS: dict[str, Any] = {"margin": None, "label_smoothing": 0.0, "center_coef": 0.0}
PLAIN_PPO: dict[str, Any] = {"cliprange": 0.2, "cliprange_high": None, "dual_clip": None}


def swapped_accuracy(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    return pairwise_reward_loss(rejected, chosen, **PLAIN_PAIRS).accuracy


@pytest.mark.parametrize("case", cases("bradley_terry"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_pairwise_reward_loss_matches_the_vectors(case: Case, dtype: torch.dtype):
    chosen = case.tensor("chosen", dtype).requires_grad_()
    rejected = case.tensor("rejected", dtype).requires_grad_()
    margin = case.tensor("margin", dtype) if "margin" in case.inputs else None
    smoothing = case.inputs.get("label_smoothing", 0.0)
    result = pairwise_reward_loss(
        chosen,
        rejected,
        margin=margin,
        label_smoothing=smoothing,
        center_coef=case.inputs.get("center", 0.0),
    )
    each = [
        pairwise_reward_loss(
            chosen[i : i + 1],
            rejected[i : i + 1],
            margin=None if margin is None else margin[i : i + 1],
            label_smoothing=smoothing,
            center_coef=0.0,
        ).loss.detach()
        for i in range(len(chosen))
    ]
    gradients = torch.autograd.grad(result.loss, (chosen, rejected))
    computed = {
        "loss": result.loss.detach(),
        "per_pair": torch.stack(each),
        "accuracy_strict": result.accuracy,
        "accuracy_ties_half": (result.accuracy + 1 - swapped_accuracy(chosen, rejected)) / 2,
        "margin_mean": result.margin,
        "grad_chosen": gradients[0],
        "grad_rejected": gradients[1],
    }
    assert_matches(case, computed, dtype)


@pytest.mark.parametrize("case", cases("policy_loss"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_policy_loss_matches_the_vectors(case: Case, dtype: torch.dtype):
    logprobs = case.tensor("logp", dtype).requires_grad_()
    mask, inputs = case.mask(), case.inputs
    high = inputs["eps_high"]
    arguments = (case.tensor("old_logp", dtype), case.tensor("adv", dtype))
    options = {
        "cliprange": inputs["eps_low"],
        "cliprange_high": None if high == inputs["eps_low"] else high,
        "dual_clip": inputs["dual_clip"],
    }
    result = ppo_policy_loss(logprobs, *arguments, mask, **options, num_tokens=None)
    per_token = torch.zeros_like(logprobs.detach())
    for row, column in mask.nonzero().tolist():
        alone = torch.zeros_like(mask)
        alone[row, column] = True
        loss = ppo_policy_loss(logprobs.detach(), *arguments, alone, **options, num_tokens=1).loss
        per_token[row, column] = loss
    (gradient,) = torch.autograd.grad(result.loss, logprobs)

    def loss_of(reduction: Literal["sequence", "constant"], *, max_length: int) -> torch.Tensor:
        divisor = loss_divisor(
            mask,
            reduction=reduction,
            num_tokens=mask.sum(),
            num_sequences=mask.any(-1).sum(),
            max_length=max_length,
        )
        losses = ppo_policy_loss(logprobs, *arguments, mask, **options, num_tokens=divisor)
        return losses.loss.detach()

    computed = {
        "per_token_loss": per_token,
        "loss_token_mean": result.loss.detach(),
        "grad_token_mean": gradient,
        "loss_seq_mean_token_mean": loss_of("sequence", max_length=1),
        "loss_seq_mean_token_sum": loss_of("constant", max_length=1),
        "loss_seq_mean_token_sum_norm": loss_of("constant", max_length=mask.shape[1]),
        "clipfrac": result.clipfrac,
        "approx_kl_k3": result.approx_kl,
    }
    assert_matches(case, computed, dtype)


@pytest.mark.parametrize("case", cases("value_loss"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_value_loss_matches_the_vectors(case: Case, dtype: torch.dtype):
    values = case.tensor("values", dtype).requires_grad_()
    old_values, returns = case.tensor("old_values", dtype), case.tensor("returns", dtype)
    result = clipped_value_loss(
        values,
        old_values,
        returns,
        case.mask(),
        cliprange_value=case.inputs["clip"],
        num_tokens=None,
    )
    computed = {
        "loss": result.loss.detach(),
        "clipfrac": result.clipfrac,
        "grad": torch.autograd.grad(result.loss, values)[0],
        "explained_variance_old": explained_variance(old_values, returns, case.mask()),
    }
    assert_matches(case, computed, dtype)


@pytest.mark.parametrize("case", cases("sft"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_language_model_loss_matches_the_vectors(case: Case, dtype: torch.dtype):
    logits, labels = case.tensor("logits", dtype), case.ids("labels")
    rows = range(len(labels))
    num_tokens = (labels != -100).sum()
    halves = [(logits[rows_of], labels[rows_of]) for rows_of in case.inputs["split"]]
    computed = {
        "loss": causal_lm_loss(logits, labels, num_tokens=None),
        "n_tokens": num_tokens,
        "per_row_sum": torch.stack(
            [causal_lm_loss(logits[i : i + 1], labels[i : i + 1], num_tokens=1) for i in rows]
        ),
        "wrong_mean_of_microbatch_means": torch.stack(
            [causal_lm_loss(*half, num_tokens=None) for half in halves]
        ).mean(),
    }
    assert_matches(case, computed, dtype)
    parts = sum(causal_lm_loss(*half, num_tokens=num_tokens) for half in halves)
    torch.testing.assert_close(parts, computed["loss"])


def test_losses_without_a_token_are_zero_with_a_graph():
    mask = torch.zeros(2, 3, dtype=torch.bool)
    x = torch.full((2, 3), torch.nan, requires_grad=True)
    other = torch.zeros(2, 3)
    logits = torch.randn(2, 3, 5, requires_grad=True)
    no_labels = torch.full((2, 3), -100)
    no_pairs = torch.zeros(0, requires_grad=True)
    for num_tokens in (None, 0, 0.0, torch.tensor(0)):
        policy = ppo_policy_loss(x, other, other, mask, **PLAIN_PPO, num_tokens=num_tokens)
        value = clipped_value_loss(
            x, other, other, mask, cliprange_value=0.2, num_tokens=num_tokens
        )
        language = causal_lm_loss(logits, no_labels, num_tokens=num_tokens)
        for loss, leaf in ((policy.loss, x), (value.loss, x), (language, logits)):
            assert loss.item() == 0
            (gradient,) = torch.autograd.grad(loss, leaf)
            assert torch.equal(gradient, torch.zeros_like(leaf))
        assert policy.clipfrac == policy.approx_kl == value.clipfrac == 0
    pairs = pairwise_reward_loss(no_pairs, no_pairs, **PLAIN_PAIRS)
    assert pairs.loss.item() == pairs.accuracy.item() == pairs.margin.item() == 0
    assert pairs.loss.requires_grad


def test_half_precision_scores_and_logprobs_give_float32_losses():
    x = torch.randn(2, 3).bfloat16()
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert ppo_policy_loss(x, x, x, mask, **PLAIN_PPO, num_tokens=None).loss.dtype == torch.float32
    value = clipped_value_loss(x, x, x, mask, cliprange_value=None, num_tokens=None)
    assert value.loss.dtype == value.clipfrac.dtype == torch.float32
    assert pairwise_reward_loss(x, x, **PLAIN_PAIRS).loss.dtype == torch.float32
    logits = torch.randn(2, 3, 5).bfloat16()
    labels = torch.zeros(2, 3, dtype=torch.int64)
    assert causal_lm_loss(logits, labels, num_tokens=None).dtype == torch.float32


def test_a_ratio_that_overflows_keeps_loss_and_gradient_finite():
    logprobs = torch.tensor([[0.0, -1000.0]], requires_grad=True)
    old = torch.tensor([[-1000.0, 0.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    for sign in (-1.0, 1.0):
        result = ppo_policy_loss(
            logprobs, old, torch.full((1, 2), sign), mask, **PLAIN_PPO, num_tokens=None
        )
        (gradient,) = torch.autograd.grad(result.loss, logprobs)
        assert result.loss.isfinite()
        assert result.approx_kl.isfinite()
        assert gradient.isfinite().all()


def test_a_token_that_became_far_too_likely_is_pulled_back():
    # exp(25) times as likely, and worse than average: the clamp of the ratio keeps its gradient.
    logprobs = torch.tensor([[-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.tensor([[-26.0, -1.0]], dtype=torch.float64), torch.ones(1, 2).bool()
    result = ppo_policy_loss(logprobs, old, -mask.double(), mask, **PLAIN_PPO, num_tokens=None)
    result.loss.backward()
    expected = torch.tensor([[math.exp(20) / 2, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-12, atol=0)


def test_every_token_of_a_response_has_one_gradient_under_gspo_however_far_one_has_moved():
    logprobs = torch.tensor([[-45.0] + [-1.0] * 99], dtype=torch.float64, requires_grad=True)
    old, mask = torch.full((1, 100), -1.0, dtype=torch.float64), torch.ones(1, 100).bool()
    wide = {"cliprange": 0.5, "cliprange_high": None, "dual_clip": None}
    result = gspo_policy_loss(logprobs, old, mask.double(), mask, **wide, num_tokens=None)
    assert result.loss.item() == pytest.approx(-math.exp(-0.44), rel=1e-12)  # the mean of all
    result.loss.backward()
    torch.testing.assert_close(
        logprobs.grad, torch.full_like(old, -math.exp(-0.44) / 100), rtol=1e-12, atol=0
    )
