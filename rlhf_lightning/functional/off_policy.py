"""Importance weights for tokens that another distribution sampled than the policy that learns.

An engine samples with other kernels, in another precision or with older weights than those of the
training module. The ratio `exp(old_logprobs - sampler_logprobs)` corrects for it; it is no part of
the ratio that a surrogate clips, which is that of the policy in training to the old one.

Legend: B rows, R response. `old_logprobs` are those that the training module gave the tokens before
the updates, `sampler_logprobs` those under the distribution that they were drawn from, in nats.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_lightning.functional.kl import MAX_LOG_RATIO, kl_k1, kl_k3
from rlhf_lightning.functional.masked import zero_off_mask


@torch.no_grad()
def truncated_weights(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, *, cap: float
) -> Tensor:
    """Return one weight a token, `min(ratio, cap)`: truncated importance sampling.

    Truncation bounds the variance. Where it acts the weight is too small, so that the gradient of
    such tokens is biased towards 0.

    Args:
        old_logprobs: `[B, R]` nats, from the policy at the rollout.
        sampler_logprobs: `[B, R]` nats, from the sampler.
        mask: `[B, R]` bool, True on actions, the stop token included.
        cap: largest weight, at least 1.

    Returns:
        `[B, R]` without a graph, at least float32, 0 off the mask; exactly 1 where both agree.

    Source: Espeholt et al. 2018, "IMPALA", section 4.1 (the truncated weight of V-trace); Yao et
    al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    log_ratio = zero_off_mask(kl_k1(old_logprobs, sampler_logprobs), mask)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return zero_off_mask(ratio.clamp(max=cap), mask)


@torch.no_grad()
def masked_weights(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, *, low: float, high: float
) -> Tensor:
    """Return one weight a sequence: its ratio inside `low` to `high`, 0 outside.

    A response that the policy and the sampler see too differently is left out whole.

    Args:
        old_logprobs: `[B, R]` nats, from the policy at the rollout.
        sampler_logprobs: `[B, R]` nats, from the sampler.
        mask: `[B, R]` bool, True on actions, the stop token included.
        low: smallest ratio of a sequence that counts, at most 1.
        high: largest one, at least 1.

    Returns:
        `[B, R]` without a graph, at least float32, the same at every token of a row and 0 off the
        mask; exactly 1 where both agree.

    Source: Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the
    training-inference mismatch" (masked importance sampling).
    """
    ratios = sequence_ratios(old_logprobs, sampler_logprobs, mask).unsqueeze(-1)  # [B, 1]
    kept = (ratios >= low) & (ratios <= high)
    return zero_off_mask(ratios.expand(mask.shape), mask & kept)


@torch.no_grad()
def sequence_ratios(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return `[B]` products of the ratios of each row's tokens; their logarithm is within +-20.

    Args:
        old_logprobs: `[B, R]` nats, from the policy at the rollout.
        sampler_logprobs: `[B, R]` nats, from the sampler.
        mask: `[B, R]` bool, True on actions.
    """
    log_ratio = kl_k1(old_logprobs, sampler_logprobs)
    total = zero_off_mask(log_ratio, mask).sum(-1)
    return total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


class Mismatch(NamedTuple):
    """Distance of the policy from the sampler of its tokens.

    Args:
        mean_abs: mean of |log ratio|, nats a token.
        max_abs: the largest of them.
        kl_k1: k1 estimate of KL(sampler || policy), nats a token, of either sign.
        kl_k3: k3 estimate of the same.
        effective_sample_size: `(sum w)^2 / (n sum w^2)` over the n sequences with their ratios as
            weights w: the share of the responses that as many of the policy's own would be worth.
    """

    mean_abs: float
    max_abs: float
    kl_k1: float
    kl_k3: float
    effective_sample_size: float


class MismatchSums(NamedTuple):
    """Sums of which those of several ranks make one `Mismatch`; see `mismatch`."""

    tokens: float
    rows: float
    abs: float
    k1: float
    k3: float
    ratios: float
    squared_ratios: float
    max_abs: float


@torch.no_grad()
def mismatch_sums(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> MismatchSums:
    """Return what a rank's rows add to `mismatch`; rows without an action count nothing.

    Args:
        old_logprobs: `[B, R]` nats, from the policy at the rollout.
        sampler_logprobs: `[B, R]` nats, from the sampler.
        mask: `[B, R]` bool, True on actions.
    """
    old, sampler = old_logprobs.double(), sampler_logprobs.double()
    k1 = zero_off_mask(kl_k1(sampler, old), mask)
    k3 = zero_off_mask(kl_k3(sampler, old), mask)
    rows = mask.any(-1)
    ratios = zero_off_mask(sequence_ratios(old, sampler, mask), rows)
    largest = k1.abs().max() if k1.numel() else k1.sum()
    parts = (mask.sum(), rows.sum(), k1.abs().sum(), k1.sum(), k3.sum(), ratios.sum())
    values = torch.stack([*(part.double() for part in parts), ratios.square().sum(), largest])
    return MismatchSums(*values.tolist())


def mismatch(parts: list[MismatchSums]) -> Mismatch | None:
    """Return the figures of the rows of all ranks; None if there is no token.

    Args:
        parts: one result of `mismatch_sums` per rank.

    Source: the estimators are those of Schulman 2020, "Approximating KL divergence"; the effective
    sample size is that of Kong 1992, "A note on importance sampling using standardized weights".
    """
    tokens, rows, absolute, k1, k3, ratios, squares, _ = (
        sum(column) for column in zip(*parts, strict=True)
    )
    if not tokens:
        return None
    return Mismatch(
        mean_abs=absolute / tokens,
        max_abs=max(part.max_abs for part in parts),
        kl_k1=k1 / tokens,
        kl_k3=k3 / tokens,
        effective_sample_size=ratios**2 / (rows * squares),
    )
