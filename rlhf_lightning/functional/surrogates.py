"""Surrogates: policy losses that own their parameters, by the functions of `functional.losses`.

Legend: B rows of a rank, R response.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rlhf_lightning.functional.losses import (
    PolicyLoss,
    cispo_policy_loss,
    gspo_policy_loss,
    ppo_policy_loss,
)


class Surrogate(Protocol):
    """The loss of a policy on tokens that an older policy sampled."""

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        num_tokens: Tensor | float | None,
    ) -> PolicyLoss:
        """Return the loss; the arguments are those of `ppo_policy_loss`, each `[B, R]`."""


@dataclass(frozen=True)
class ClippedRatio:
    """PPO: the ratio of each token is clipped; see `ppo_policy_loss`."""

    cliprange: float
    cliprange_high: float | None = None
    dual_clip: float | None = None

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        num_tokens: Tensor | float | None,
    ) -> PolicyLoss:
        """Return the loss."""
        return ppo_policy_loss(
            logprobs, old_logprobs, advantages, mask, **vars(self), num_tokens=num_tokens
        )


@dataclass(frozen=True)
class ClippedSequenceRatio:
    """GSPO: the ratio of each response is clipped; see `gspo_policy_loss`."""

    cliprange: float
    cliprange_high: float | None = None
    dual_clip: float | None = None

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        num_tokens: Tensor | float | None,
    ) -> PolicyLoss:
        """Return the loss."""
        return gspo_policy_loss(
            logprobs, old_logprobs, advantages, mask, **vars(self), num_tokens=num_tokens
        )


@dataclass(frozen=True)
class ClippedWeight:
    """CISPO: the weight of each token's gradient is clipped; see `cispo_policy_loss`."""

    cliprange: float
    cliprange_high: float | None = None

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        num_tokens: Tensor | float | None,
    ) -> PolicyLoss:
        """Return the loss."""
        return cispo_policy_loss(
            logprobs, old_logprobs, advantages, mask, **vars(self), num_tokens=num_tokens
        )


# By the values of `surrogate` of the hyper-parameters, which have the fields' names.
SURROGATES: dict[str, type[ClippedRatio | ClippedSequenceRatio | ClippedWeight]] = {
    "ppo": ClippedRatio,
    "gspo": ClippedSequenceRatio,
    "cispo": ClippedWeight,
}
