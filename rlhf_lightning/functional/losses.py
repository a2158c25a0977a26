"""The losses of supervised fine-tuning, reward modelling, preference and policy optimisation.

Legend: B rows, T or R positions, V vocabulary. Every mean over tokens is `sum / num_tokens`:
with the global count of the optimizer step as `num_tokens` the losses of micro-batches and ranks
add up to that of the whole batch; a mean of means does not. None stands for the tokens of this
call. No tokens give a loss of 0 that still has a graph.

Losses of responses `[B, R]` also take a divisor of `loss_divisor` as `num_tokens`: a scalar, or
`[B, 1]` with one number a row. The loss is then `(per_token / divisor).sum()`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rlhf_lightning.functional.kl import MAX_LOG_RATIO, kl_k2, kl_k3
from rlhf_lightning.functional.masked import at_least_float32, zero_off_mask
from rlhf_lightning.functional.sequences import IGNORED_LABEL


class PolicyLoss(NamedTuple):
    """Result of a policy loss: scalars; only `loss` has a graph.

    `clipfrac` and `approx_kl` weigh tokens as the loss does, so that those of micro-batches and
    ranks add up too: means over tokens with a token count, means over sequences of each
    sequence's own mean with the "sequence" divisor. The "constant" divisor counts positions that
    have no token: multiply them by divisor / number of tokens for means over tokens.

    Args:
        loss: the surrogate, to be minimised.
        clipfrac: fraction of tokens that clipping changed or a mask left out.
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


def loss_divisor(
    mask: Tensor,
    *,
    reduction: Literal["token", "sequence", "constant"],
    num_tokens: Tensor | float,
    num_sequences: Tensor | float,
    max_length: int,
) -> Tensor:
    """Return the divisor that makes a loss the wanted mean, to be given as `num_tokens`.

    "token": `num_tokens`, every token counts the same (DAPO). "sequence": `num_sequences` times
    the row's own length, the mean over sequences of the mean over tokens (GRPO, GSPO).
    "constant": `num_sequences * max_length`, in which neither the own length nor that of the
    others matters (Dr. GRPO); with a `max_length` of 1 the mean over sequences of the sum over
    tokens (RLOO).

    Args:
        mask: `[B, R]` bool, True on actions.
        reduction: how tokens are averaged.
        num_tokens: actions of the whole optimizer step, over micro-batches and ranks.
        num_sequences: responses of the whole optimizer step that have a token.
        max_length: longest response that is allowed, in tokens.

    Returns:
        `[B, 1]` for "sequence", where a row without a token counts as one of length 1: its sum is
        0, and stays 0; else a scalar.

    Raises:
        ValueError: if `reduction` is none of the three.

    Source: Yu et al. 2025, "DAPO", section 3.3; Shao et al. 2024, "DeepSeekMath", equation 3; Liu
    et al. 2025, "Understanding R1-Zero-like training" (Dr. GRPO).
    """
    if reduction == "token":
        return torch.as_tensor(num_tokens, device=mask.device)
    if reduction == "sequence":
        return num_sequences * mask.sum(dim=-1, keepdim=True).clamp(min=1)
    if reduction == "constant":
        return torch.as_tensor(num_sequences * max_length, device=mask.device)
    raise ValueError(f"reduction={reduction!r} must be 'token', 'sequence' or 'constant'")


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
    the exponential; its gradient is kept, so that a token that has become far too likely is pulled
    back. `clipfrac` counts tokens whose clipped branch was strictly larger; it and
    `approx_kl` are divided by the same number, so that those of micro-batches add up too.

    Args:
        logprobs: `[B, R]` of the policy in training, nats.
        old_logprobs: `[B, R]` of the policy that sampled, same model, temperature and precision.
        advantages: `[B, R]`, usually whitened, or one number along each row (GRPO, RLOO).
        mask: `[B, R]` bool, True on actions, the stop token included.
        cliprange: how far the ratio may fall below 1.
        cliprange_high: how far it may rise above 1; None for `cliprange`.
        dual_clip: cap on the loss for A < 0, above 1; None for plain PPO.
        num_tokens: actions of the whole optimizer step, a divisor of `loss_divisor`, or None for
            the actions of this call.

    Returns:
        Scalars, at least float32.

    Source: Schulman et al. 2017, equation 7; Yu et al. 2025, "DAPO" (`cliprange_high`); Ye et al.
    2020, "Mastering complex control in MOBA games" (`dual_clip`).
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    ratio = log_ratio.exp()
    return _clipped_surrogate(
        ratio, log_ratio, advantages, mask, cliprange, cliprange_high, dual_clip, num_tokens
    )


def gspo_policy_loss(
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
    """Return the surrogate of PPO with one ratio a sequence, to be minimised.

    The ratio of a row is `exp(mean over its valid tokens of logprobs - old_logprobs)`, the
    geometric mean of the ratios of its tokens, its logarithm clamped to +-20, and the loss that of
    `ppo_policy_loss` with it at every token: a whole response is clipped or is not, and every token
    of a response gets the same gradient, `-A ratio / divisor`. The ratio moves far less than that
    of a token: ranges of 3e-4 and 4e-4 are those of the paper, whose loss is the mean over
    sequences (give the "sequence" divisor; a token count weighs sequences by their length).
    `approx_kl` is that of the tokens.

    Args:
        logprobs: `[B, R]` of the policy in training, nats.
        old_logprobs: `[B, R]` of the policy that sampled, same model, temperature and precision.
        advantages: `[B, R]`, constant along a row.
        mask: `[B, R]` bool, True on actions, the stop token included.
        cliprange: how far the ratio may fall below 1.
        cliprange_high: how far it may rise above 1; None for `cliprange`.
        dual_clip: cap on the loss for A < 0, above 1; None for plain GSPO.
        num_tokens: the divisor, as in `ppo_policy_loss`.

    Returns:
        Scalars, at least float32.

    Source: Zheng et al. 2025, "Group sequence policy optimization", equations 5 and 7.
    """
    log_ratio = _free_log_ratio(logprobs, old_logprobs, mask)
    lengths = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    ratio = _bounded(log_ratio.sum(dim=-1, keepdim=True) / lengths).exp()  # [B, 1]
    bounded = _bounded(log_ratio)
    return _clipped_surrogate(
        ratio, bounded, advantages, mask, cliprange, cliprange_high, dual_clip, num_tokens
    )


def cispo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cliprange: float,
    cliprange_high: float | None,
    num_tokens: Tensor | float | None,
) -> PolicyLoss:
    """Return the policy gradient with clipped weights, to be minimised.

    With `weight = clip(exp(logprobs - old_logprobs), 1 - cliprange, 1 + cliprange_high)` without
    a graph, the sum over valid tokens of `-A weight logprobs`, over `num_tokens`. Clipping bounds
    the weight and no token loses its gradient. `clipfrac` counts weights that were clipped.

    Args:
        logprobs: `[B, R]` of the policy in training, nats.
        old_logprobs: `[B, R]` of the policy that sampled, same model, temperature and precision.
        advantages: `[B, R]` per token, without a graph.
        mask: `[B, R]` bool, True on actions, the stop token included.
        cliprange: how far the weight may fall below 1; 1 for no lower bound, as in the paper.
        cliprange_high: how far it may rise above 1; None for `cliprange`.
        num_tokens: the divisor, as in `ppo_policy_loss`.

    Returns:
        Scalars, at least float32.

    Source: MiniMax 2025, "MiniMax-M1", equations 4 and 5.
    """
    high = cliprange if cliprange_high is None else cliprange_high
    divisor = _divisor(mask, num_tokens)
    with torch.no_grad():
        log_ratio = _log_ratio(logprobs, old_logprobs, mask)
        ratio = log_ratio.exp()
        weight = ratio.clamp(1 - cliprange, 1 + high)
        clipfrac = _reduce((weight != ratio).to(ratio.dtype), divisor)
    advantages = zero_off_mask(at_least_float32(advantages), mask)
    per_token = -advantages * weight * zero_off_mask(at_least_float32(logprobs), mask)  # [B, R]
    return PolicyLoss(_reduce(per_token, divisor), clipfrac, _approx_kl(log_ratio, divisor))


def masked_policy_loss(
    logprobs: Tensor,
    base_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    kind: Literal["ratio", "probability"],
    cliprange: float,
    cliprange_high: float | None,
    num_tokens: Tensor | float | None,
) -> PolicyLoss:
    """Return the policy gradient of the tokens inside a trust region, to be minimised.

    With `ratio = exp(logprobs - base_logprobs)` and advantage A, the sum of `-A ratio` over the
    valid tokens inside, over `num_tokens`. A token outside has no loss and no gradient, whatever
    the sign of its advantage; the divisor still counts it. `clipfrac` counts the tokens outside.

    Args:
        logprobs: `[B, R]` of the policy in training, nats.
        base_logprobs: `[B, R]` of the old policy or of the sampler.
        advantages: `[B, R]` per token, without a graph.
        mask: `[B, R]` bool, True on actions, the stop token included.
        kind: what is bounded; see `inside_trust_region`, which has the bounds.
        cliprange: how far it may fall.
        cliprange_high: how far it may rise; None for `cliprange`.
        num_tokens: the divisor, as in `ppo_policy_loss`.

    Returns:
        Scalars, at least float32.

    Raises:
        ValueError: if `kind` is neither.

    Source: Hou et al. 2026, "Single-rollout asynchronous optimization for agentic reinforcement
    learning" (SAO), arXiv 2607.07508, equation 3.
    """
    inside = inside_trust_region(
        logprobs, base_logprobs, mask, kind=kind, cliprange=cliprange, cliprange_high=cliprange_high
    )
    log_ratio, divisor = _log_ratio(logprobs, base_logprobs, mask), _divisor(mask, num_tokens)
    advantages = zero_off_mask(at_least_float32(advantages), inside)
    per_token = zero_off_mask(-advantages * log_ratio.exp(), inside)  # [B, R]
    with torch.no_grad():
        clipfrac = _reduce((mask & ~inside).to(log_ratio.dtype), divisor)
    return PolicyLoss(_reduce(per_token, divisor), clipfrac, _approx_kl(log_ratio, divisor))


@torch.no_grad()
def inside_trust_region(
    logprobs: Tensor,
    base_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: Literal["ratio", "probability"],
    cliprange: float,
    cliprange_high: float | None,
) -> Tensor:
    """Return the valid tokens that are inside a trust region, `[B, R]` bool.

    With p and p_base the probabilities of the token, and bounds included:

        "ratio"        1 - cliprange <= p / p_base <= 1 + cliprange_high
        "probability"     -cliprange <= p - p_base <= cliprange_high

    The ratio of a rare token may be large though its probability has hardly moved: "probability"
    keeps such tokens.

    Args:
        logprobs: `[B, R]` of the policy in training, nats.
        base_logprobs: `[B, R]` of the old policy or of the sampler.
        mask: `[B, R]` bool, True on actions.
        kind: what is bounded.
        cliprange: how far it may fall.
        cliprange_high: how far it may rise; None for `cliprange`.

    Raises:
        ValueError: if `kind` is neither.

    Source: arXiv 2607.07508, equation 3 ("ratio"); DPPO, arXiv 2602.04879 ("probability", the
    total variation of the sampled token). DPPO's own mask keeps a token outside whose advantage
    pulls it back.
    """
    high = cliprange if cliprange_high is None else cliprange_high
    if kind == "ratio":
        moved = _log_ratio(logprobs, base_logprobs, mask).exp() - 1
    elif kind == "probability":
        new, base = (zero_off_mask(at_least_float32(x), mask) for x in (logprobs, base_logprobs))
        moved = new.exp() - base.exp()
    else:
        raise ValueError(f"kind={kind!r} must be 'ratio' or 'probability'")
    return mask & (moved >= -cliprange) & (moved <= high)


def policy_kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    estimator: Literal["k2", "k3"],
    num_tokens: Tensor | float | None,
) -> Tensor:
    """Return the estimate of KL(policy || reference) for the loss, `sum / num_tokens`.

    On tokens of the policy itself the expected gradient of k2 is that of KL(policy || reference).
    That of k3, which GRPO and TRL have, belongs to KL(reference || policy), which has another
    optimum. k1 has an expected gradient of 0 and is not offered.

    Args:
        logprobs: `[B, R]` of the policy in training, nats.
        ref_logprobs: `[B, R]` of the reference.
        mask: `[B, R]` bool, True on actions, the stop token included.
        estimator: the KL estimator, "k2" or "k3".
        num_tokens: the divisor, as in `ppo_policy_loss`.

    Returns:
        A scalar, at least float32, with a graph.

    Raises:
        ValueError: if `estimator` is neither.

    Source: Tang and Munos 2025, arXiv 2506.09477; Shao et al. 2024, "DeepSeekMath", equation 4
    (k3).
    """
    if estimator not in ("k2", "k3"):
        raise ValueError(
            f"estimator={estimator!r} must be 'k2' or 'k3': in a loss the gradient of k1 is 0 in "
            "expectation"
        )
    # Before the estimator: the gradient of NaN stays NaN when it is multiplied by 0.
    logprobs, ref_logprobs = zero_off_mask(logprobs, mask), zero_off_mask(ref_logprobs, mask)
    per_token = (kl_k2 if estimator == "k2" else kl_k3)(logprobs, ref_logprobs)
    return _reduce(per_token, _divisor(mask, num_tokens))


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
        returns: `[B, R]` targets of the values.
        mask: `[B, R]` bool, True on actions.
        cliprange_value: half width of the allowed step, or None for no clipping.
        num_tokens: the divisor, as in `ppo_policy_loss`.

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
        return ValueLoss(_reduce(0.5 * unclipped, divisor), unclipped.new_zeros(()))
    step = (values - old_values).clamp(-cliprange_value, cliprange_value)
    clipped = (old_values + step - returns).square()
    with torch.no_grad():
        clipfrac = _reduce((clipped > unclipped).to(values.dtype), divisor)
    return ValueLoss(_reduce(0.5 * torch.maximum(unclipped, clipped), divisor), clipfrac)


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    return _bounded(_free_log_ratio(logprobs, old_logprobs, mask))


def _free_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    log_ratio = at_least_float32(logprobs) - at_least_float32(old_logprobs)
    return zero_off_mask(log_ratio, mask)


def _bounded(log_ratio: Tensor) -> Tensor:
    """Return log-ratios clamped to +-20, with the gradient that they have without the clamp."""
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kept = bounded.detach() + (log_ratio - log_ratio.detach())
    return torch.where(log_ratio.isfinite() & (log_ratio != bounded), kept, bounded)


def _clipped_surrogate(
    ratio: Tensor,  # [B, R], or [B, 1] for one ratio a row
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cliprange: float,
    cliprange_high: float | None,
    dual_clip: float | None,
    num_tokens: Tensor | float | None,
) -> PolicyLoss:
    high = cliprange if cliprange_high is None else cliprange_high
    advantages = zero_off_mask(at_least_float32(advantages), mask)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + high)
    per_token = torch.maximum(unclipped, clipped)  # [B, R]
    if dual_clip is not None:
        capped = torch.minimum(per_token, -dual_clip * advantages)
        per_token = torch.where(advantages < 0, capped, per_token)
    divisor = _divisor(mask, num_tokens)
    with torch.no_grad():
        clipfrac = _reduce((clipped > unclipped).to(ratio.dtype), divisor)
    return PolicyLoss(_reduce(per_token, divisor), clipfrac, _approx_kl(log_ratio, divisor))


@torch.no_grad()
def _approx_kl(log_ratio: Tensor, divisor: Tensor) -> Tensor:
    return _reduce(log_ratio.expm1() - log_ratio, divisor)


def _reduce(per_token: Tensor, divisor: Tensor) -> Tensor:
    if divisor.dim() == 0:  # one division, after the sum
        return per_token.sum() / divisor
    return (per_token / divisor).sum()


def _divisor(mask: Tensor, num_tokens: Tensor | float | None) -> Tensor:
    count = mask.sum() if num_tokens is None else torch.as_tensor(num_tokens, device=mask.device)
    # No tokens at all: the sum is 0 and must stay 0, with its graph, instead of 0 / 0.
    return torch.where(count > 0, count, torch.ones_like(count))
