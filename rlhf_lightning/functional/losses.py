"""The losses of supervised fine-tuning, reward modelling and PPO.

Legend: B rows, T or R positions, V vocabulary. Every mean over tokens is `sum / num_tokens`:
with the global count of the optimizer step as `num_tokens` the losses of micro-batches and ranks
add up to that of the whole batch; a mean of means does not. None stands for the tokens of this
call. No tokens give a loss of 0 that still has a graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from rlhf_lightning.functional.kl import MAX_LOG_RATIO
from rlhf_lightning.functional.masked import at_least_float32, zero_off_mask
from rlhf_lightning.functional.sequences import IGNORED_LABEL


class RewardLoss(NamedTuple):
    """Result of `pairwise_reward_loss`: scalars; only `loss` has a graph.

    Args:
        loss: nats per pair.
        accuracy: fraction of pairs with chosen strictly above rejected.
        margin: mean of chosen - rejected, in units of the reward model.
    """

    loss: Tensor
    accuracy: Tensor
    margin: Tensor


class PolicyLoss(NamedTuple):
    """Result of `ppo_policy_loss`: scalars; only `loss` has a graph.

    Args:
        loss: the clipped surrogate.
        clipfrac: fraction of tokens whose clipped branch was strictly larger.
        approx_kl: k3 estimate of KL(old || new), nats per token.
    """

    loss: Tensor
    clipfrac: Tensor
    approx_kl: Tensor


class ValueLoss(NamedTuple):
    """Result of `clipped_value_loss`: scalars; only `loss` has a graph.

    Args:
        loss: half the mean squared error, the worse of clipped and unclipped.
        clipfrac: fraction of tokens whose clipped branch was strictly larger.
    """

    loss: Tensor
    clipfrac: Tensor


def causal_lm_loss(logits: Tensor, labels: Tensor, *, num_tokens: Tensor | float | None) -> Tensor:
    """Return the mean cross-entropy of the labels, `-sum log softmax(logits)[labels] / N`.

    Args:
        logits: `[B, T, V]`; `logits[:, t]` predicts `labels[:, t]`, already shifted.
        labels: `[B, T]` int64; -100 does not count.
        num_tokens: N, the labels of the whole optimizer step, or None for those of this call.

    Returns:
        A scalar, nats per token, at least float32.
    """
    total = cross_entropy(
        at_least_float32(logits).flatten(0, -2),
        labels.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )
    return total / _divisor(labels != IGNORED_LABEL, num_tokens)


def pairwise_reward_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margin: Tensor | None,
    label_smoothing: float,
    center_coef: float,
) -> RewardLoss:
    """Return the Bradley-Terry loss of pairs, with the usual options.

    With `d = chosen - rejected - margin` and smoothing s, the mean over pairs of
    `-(1 - s) logsigmoid(d) - s logsigmoid(-d) + center_coef (chosen + rejected)^2`. Accuracy and
    the reported margin ignore all three options.

    Args:
        chosen: `[B]` scores of the preferred answers.
        rejected: `[B]` scores of the others.
        margin: `[B]` wanted distance, or None for 0.
        label_smoothing: probability that a label is wrong, 0 to below 0.5; 0 for none.
        center_coef: weight of the penalty that keeps scores of different prompts near 0.

    Returns:
        Scalars, at least float32; all 0 for no pairs.

    Source: Stiennon et al. 2020, section 3.4 (loss); Touvron et al. 2023, equation 2 (margin);
    Eisenstein et al. 2023 (centring).
    """
    chosen, rejected = at_least_float32(chosen), at_least_float32(rejected)
    num_pairs = max(chosen.numel(), 1)
    difference = chosen - rejected
    d = difference if margin is None else difference - margin
    likelihood = (1 - label_smoothing) * logsigmoid(d)
    if label_smoothing:
        likelihood = likelihood + label_smoothing * logsigmoid(-d)
    per_pair = -likelihood
    if center_coef:
        per_pair = per_pair + center_coef * (chosen + rejected).square()
    accuracy = (difference.detach() > 0).to(difference.dtype).sum() / num_pairs
    return RewardLoss(per_pair.sum() / num_pairs, accuracy, difference.detach().sum() / num_pairs)


def ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cliprange: float,
    cliprange_high: float | None,
    dual_clip: float | None,
    num_tokens: Tensor | float | None,
) -> PolicyLoss:
    """Return PPO's clipped surrogate, to be minimised.

    With `ratio = exp(logprobs - old_logprobs)` and advantage A, the sum over valid tokens of
    `max(-A ratio, -A clip(ratio, 1 - cliprange, 1 + cliprange_high))`, over `num_tokens`. With
    `dual_clip` c a token with A < 0 loses at most `-c A`. The log-ratio is clamped to +-20 before
    the exponential. `clipfrac` and `approx_kl` are divided by the same number, so that those of
    micro-batches add up too.

    Args:
        logprobs: `[B, R]` of the policy in training, nats.
        old_logprobs: `[B, R]` of the policy that sampled, same model, temperature and precision.
        advantages: `[B, R]`, usually whitened.
        mask: `[B, R]` bool, True on actions, the stop token included.
        cliprange: how far the ratio may fall below 1.
        cliprange_high: how far it may rise above 1; None for `cliprange`.
        dual_clip: cap on the loss for A < 0, above 1; None for plain PPO.
        num_tokens: actions of the whole optimizer step, or None for those of this call.

    Returns:
        Scalars, at least float32.

    Source: Schulman et al. 2017, equation 7; Yu et al. 2025, "DAPO" (`cliprange_high`); Ye et al.
    2020, "Mastering complex control in MOBA games" (`dual_clip`).
    """
    high = cliprange if cliprange_high is None else cliprange_high
    log_ratio = at_least_float32(logprobs) - at_least_float32(old_logprobs)
    log_ratio = zero_off_mask(log_ratio, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    advantages = zero_off_mask(at_least_float32(advantages), mask)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + high)
    per_token = torch.maximum(unclipped, clipped)  # [B, R]
    if dual_clip is not None:
        capped = torch.minimum(per_token, -dual_clip * advantages)
        per_token = torch.where(advantages < 0, capped, per_token)
    divisor = _divisor(mask, num_tokens)
    with torch.no_grad():
        clipfrac = (clipped > unclipped).to(ratio.dtype).sum() / divisor
        approx_kl = (log_ratio.expm1() - log_ratio).sum() / divisor
    return PolicyLoss(per_token.sum() / divisor, clipfrac, approx_kl)


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    cliprange_value: float | None,
    num_tokens: Tensor | float | None,
) -> ValueLoss:
    """Return half the mean squared error of the values, pessimistic about large steps.

    The sum over valid tokens of `max((v - R)^2, (clip(v, old +- cliprange_value) - R)^2) / 2`,
    over `num_tokens`. The clip range is in units of the score, so scores must be normalised.

    Args:
        values: `[B, R]` of the value model in training, of the state before token t.
        old_values: `[B, R]` at the rollout.
        returns: `[B, R]` targets.
        mask: `[B, R]` bool, True on actions.
        cliprange_value: half width of the allowed step, or None for no clipping.
        num_tokens: actions of the whole optimizer step, or None for those of this call.

    Returns:
        Scalars, at least float32.

    Source: Schulman et al. 2017, released code; Ziegler et al. 2019, released code.
    """
    values, old_values = at_least_float32(values), at_least_float32(old_values)
    returns = zero_off_mask(at_least_float32(returns), mask)
    values, old_values = zero_off_mask(values, mask), zero_off_mask(old_values, mask)
    unclipped = (values - returns).square()
    divisor = _divisor(mask, num_tokens)
    if cliprange_value is None:
        return ValueLoss(0.5 * unclipped.sum() / divisor, unclipped.new_zeros(()))
    step = (values - old_values).clamp(-cliprange_value, cliprange_value)
    clipped = (old_values + step - returns).square()
    with torch.no_grad():
        clipfrac = (clipped > unclipped).to(values.dtype).sum() / divisor
    return ValueLoss(0.5 * torch.maximum(unclipped, clipped).sum() / divisor, clipfrac)


def _divisor(mask: Tensor, num_tokens: Tensor | float | None) -> Tensor:
    count = mask.sum() if num_tokens is None else torch.as_tensor(num_tokens, device=mask.device)
    # No tokens at all: the sum is 0 and must stay 0, with its graph, instead of 0 / 0.
    return torch.where(count > 0, count, torch.ones_like(count))
