"""Per-token estimators of KL(policy || reference), and the controller of its coefficient.

With tokens sampled from the policy and `d = ref_logprobs - logprobs`, all in nats per token.
In the reward (detached) use k1: the score function of k1 is the gradient of KL(policy || ref);
that of k3 vanishes to second order at policy = ref, and holds nothing back. In the loss
(differentiated) use k2: the expected gradient of k1 is 0, that of k3 belongs to KL(ref || policy).

Source: Schulman 2020, "Approximating KL divergence" (the estimators); Tang and Munos 2025,
arXiv 2506.09477 (their gradients).
"""

from __future__ import annotations

import math

from torch import Tensor

from rlhf_lightning.functional.masked import at_least_float32

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
MAX_RELATIVE_ERROR = 0.2


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return `logprobs - ref_logprobs`: unbiased, of either sign; the one for the reward.

    Args:
        logprobs: log-probabilities of the sampled tokens under the policy, any shape, nats.
        ref_logprobs: the same under the reference.

    Returns:
        The same shape, at least float32, not clamped.
    """
    return at_least_float32(logprobs) - at_least_float32(ref_logprobs)


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return `(logprobs - ref_logprobs)^2 / 2`: biased value, right gradient; for the loss.

    Args:
        logprobs: log-probabilities of the sampled tokens under the policy, any shape, nats.
        ref_logprobs: the same under the reference.

    Returns:
        The same shape, at least float32, not clamped.
    """
    return 0.5 * kl_k1(logprobs, ref_logprobs).square()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return `exp(d) - 1 - d` with `d = ref_logprobs - logprobs`: unbiased and never negative.

    `d` is clamped to +-20 and the value to 10, so that one token does not hide all others in a
    mean. The gradient is that of the value before it is clamped, `1 - exp(d)` with the clamped
    `d`: a penalty pulls hardest where the policy is furthest away.

    Args:
        logprobs: log-probabilities of the sampled tokens under the policy, any shape, nats.
        ref_logprobs: the same under the reference.

    Returns:
        The same shape, at least float32.
    """
    k1 = kl_k1(logprobs, ref_logprobs)
    d = -k1.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    value = (d.expm1() - d).clamp(max=MAX_K3)
    return value - d.expm1() * (k1 - k1.detach()) if k1.requires_grad else value


def adapted_kl_coef(
    kl_coef: float, observed_kl: float, *, target: float | None, horizon: float, num_episodes: int
) -> float:
    """Return the KL coefficient for the next rollout.

    `kl_coef * (1 + clip(observed_kl / target - 1, -0.2, 0.2) * num_episodes / horizon)`; the
    coefficient unchanged if `target` is None.

    Args:
        kl_coef: the coefficient that the rollout used.
        observed_kl: mean over the rollouts of all ranks of the KL summed over a response, in
            nats per response (not per token).
        target: wanted KL in nats per response, or None for a fixed coefficient.
        horizon: episodes over which the coefficient may change by its own size.
        num_episodes: responses in this rollout, over all ranks.

    Raises:
        ValueError: if `observed_kl` is NaN, `target` or `horizon` is not positive, or one step
            could make the coefficient 0 or negative (`0.2 * num_episodes / horizon >= 1`).

    Source: Ziegler et al. 2019, section 2.2.
    """
    if target is None:
        return kl_coef
    if math.isnan(observed_kl):
        raise ValueError(
            "observed_kl=nan must be a number: skip the controller on a rollout without valid "
            "tokens, and look for non-finite log-probabilities otherwise"
        )
    if not target > 0:
        raise ValueError(
            f"kl_target={target} must be positive (nats per response): use about 6, or None for "
            "a fixed kl_coef"
        )
    if not horizon > 0:
        raise ValueError(f"kl_horizon={horizon} must be positive (episodes): use about 10000")
    if MAX_RELATIVE_ERROR * num_episodes / horizon >= 1:
        raise ValueError(
            f"kl_horizon={horizon} must be more than num_episodes / 5 = {num_episodes / 5:g}, or "
            f"one rollout of num_episodes={num_episodes} can flip the sign of kl_coef: raise "
            "kl_horizon or use a smaller batch"
        )
    error = max(-MAX_RELATIVE_ERROR, min(MAX_RELATIVE_ERROR, observed_kl / target - 1))
    return kl_coef * (1 + error * num_episodes / horizon)
