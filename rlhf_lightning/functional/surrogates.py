"""Surrogates: policy losses that own their parameters, by the functions of `functional.losses`.

Legend: B rows of a rank, R response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

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


class _OfFields:
    """A surrogate whose fields are the coefficients of its `loss`."""

    loss: ClassVar[Callable[..., PolicyLoss]]

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
        return type(self).loss(
            logprobs, old_logprobs, advantages, mask, **vars(self), num_tokens=num_tokens
        )


@dataclass(frozen=True)
class ClippedRatio(_OfFields):
    """PPO: the ratio of each token is clipped; see `ppo_policy_loss`."""

    loss = staticmethod(ppo_policy_loss)
    cliprange: float
    cliprange_high: float | None = None
    dual_clip: float | None = None


@dataclass(frozen=True)
class ClippedSequenceRatio(_OfFields):
    """GSPO: the ratio of each response is clipped; see `gspo_policy_loss`."""

    loss = staticmethod(gspo_policy_loss)
    cliprange: float
    cliprange_high: float | None = None
    dual_clip: float | None = None


@dataclass(frozen=True)
class ClippedWeight(_OfFields):
    """CISPO: the weight of each token's gradient is clipped; see `cispo_policy_loss`."""

    loss = staticmethod(cispo_policy_loss)
    cliprange: float
    cliprange_high: float | None = None


# By the values of `surrogate` of the hyper-parameters, which have the fields' names.
SURROGATES: dict[str, type[ClippedRatio | ClippedSequenceRatio | ClippedWeight]] = {
    "ppo": ClippedRatio,
    "gspo": ClippedSequenceRatio,
    "cispo": ClippedWeight,
}
