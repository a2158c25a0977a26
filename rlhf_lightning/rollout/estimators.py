"""Advantage estimators: from token rewards to what the policy learns from.

Legend: B rows of a rank, R response.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.distributed.collectives import global_moments
from rlhf_lightning.functional.advantages import (
    compute_gae,
    group_advantages,
    length_adaptive_lambda,
    token_returns,
)
from rlhf_lightning.functional.masked import masked_whiten, zero_off_mask
from rlhf_lightning.functional.off_policy import masked_weights, truncated_weights
from rlhf_lightning.hparams import OnPolicyHparams


class AdvantageEstimator(Protocol):
    """Estimates the advantages of a rollout.

    `scale_free` is True if a factor on all rewards of a group changes nothing: weights of domains
    then go to the advantages.
    """

    @property
    def scale_free(self) -> bool:
        """True if the scale of a group's rewards is lost."""

    def __call__(
        self, rewards: Tensor, values: Tensor | None, mask: Tensor, group_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return advantages `[B, R]`, and the value model's targets `[B, R]` where there is one.

        Args:
            rewards: `[B, R]` token rewards, shaped.
            values: `[B, R]` of the state before token t; None without a value model.
            mask: `[B, R]` bool, True on actions.
            group_ids: `[B]`, equal for the rows of one prompt, all of which are on this rank.
        """


def whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return advantages of mean 0 and variance 1 over the actions of all ranks."""
    mean, var = global_moments(advantages, mask)
    return masked_whiten(advantages, mask, mean=mean, var=var)


@dataclass(frozen=True)
class GAE:
    """Generalised advantage estimation with a value model, whitened over all ranks.

    Args:
        gamma: discount per token.
        gae_lambda: lambda of the advantages.
        gae_lambda_value: lambda of the value model's targets; None is `gae_lambda`.
        length_alpha: None, or the lambda of a row's advantages is `1 - 1 / (alpha * length)`.

    Source: Schulman et al. 2016, equation 16; Yue et al. 2025, "VAPO" (the last two).
    """

    gamma: float
    gae_lambda: float
    gae_lambda_value: float | None = None
    length_alpha: float | None = None

    scale_free = False  # rewards are compared over all prompts

    def __call__(
        self, rewards: Tensor, values: Tensor | None, mask: Tensor, group_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return whitened advantages, and returns."""
        assert values is not None  # PPO has a value model
        gae_lambda: float | Tensor = self.gae_lambda
        gae_lambda_value = self.gae_lambda_value
        if self.length_alpha is not None:
            gae_lambda = length_adaptive_lambda(mask.sum(-1), alpha=self.length_alpha)  # [B]
            gae_lambda_value = self.gae_lambda if gae_lambda_value is None else gae_lambda_value
        found = compute_gae(
            rewards,
            values,
            mask,
            gamma=self.gamma,
            gae_lambda=gae_lambda,
            gae_lambda_value=gae_lambda_value,
        )
        return whitened(found.advantages, mask), found.returns


@dataclass(frozen=True)
class GroupBaseline:
    """Advantages of whole responses against the others of their prompt, without a value model.

    Args:
        baseline: "mean" of the group or "leave_one_out", of the sums of the token rewards.
        scale: "none"; "group_std", the standard deviation of the group; or "global_std", which
            whitens over the actions of all ranks.

    Source: Shao et al. 2024, "DeepSeekMath" (mean, group_std: GRPO); Liu et al. 2025 (mean, none:
    Dr. GRPO); Ahmadian et al. 2024 (leave_one_out: RLOO); Hu et al. 2025, "REINFORCE++" (mean,
    global_std).
    """

    baseline: Literal["mean", "leave_one_out"]
    scale: Literal["none", "group_std", "global_std"]

    @property
    def scale_free(self) -> bool:
        """True where a group's spread divides its advantages."""
        return self.scale == "group_std"

    def __call__(
        self, rewards: Tensor, values: Tensor | None, mask: Tensor, group_ids: Tensor
    ) -> tuple[Tensor, None]:
        """Return advantages, and no targets."""
        of_rows = group_advantages(
            zero_off_mask(rewards, mask).sum(-1),
            group_ids,
            baseline=self.baseline,
            scale="group_std" if self.scale == "group_std" else "none",
        )
        advantages = zero_off_mask(of_rows.unsqueeze(-1).expand_as(rewards), mask)  # [B, R]
        return whitened(advantages, mask) if self.scale == "global_std" else advantages, None


@dataclass(frozen=True)
class Returns:
    """The rewards from each token on as its advantage, without a baseline but the mean of all.

    Args:
        whiten: over the actions of all ranks.

    Source: Hu et al. 2025, "REINFORCE++".
    """

    whiten: bool

    scale_free = False  # rewards are compared over all prompts

    def __call__(
        self, rewards: Tensor, values: Tensor | None, mask: Tensor, group_ids: Tensor
    ) -> tuple[Tensor, None]:
        """Return advantages, and no targets."""
        advantages = token_returns(rewards, mask, gamma=1.0)  # [B, R]
        return whitened(advantages, mask) if self.whiten else advantages, None


def corrected_advantages(rollout: RolloutBatch, algorithm: OnPolicyHparams) -> Tensor:
    """Return `[B, R]` advantages times the importance weights, old policy over sampler.

    Weights are not negative, so this weighs the loss of each token, whatever the surrogate. The
    divisor of the loss stays the count of all tokens or responses, also of those that weigh 0.
    """
    old, sampler, mask = rollout.logprobs, rollout.sampler_logprobs, rollout.response_mask
    if algorithm.off_policy == "none" or sampler is None:
        return rollout.advantages
    if algorithm.off_policy == "truncated":
        weights = truncated_weights(old, sampler, mask, cap=algorithm.off_policy_cap)
    else:
        low, high = algorithm.off_policy_low, algorithm.off_policy_high
        weights = masked_weights(old, sampler, mask, low=low, high=high)
    return rollout.advantages * weights
