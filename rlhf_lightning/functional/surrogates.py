"""Surrogates: policy losses that own their parameters, by the functions of `functional.losses`.

Legend: B rows of a rank, R response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, Protocol, runtime_checkable

from torch import Tensor

from rlhf_lightning.functional.losses import (
    PolicyLoss,
    cispo_policy_loss,
    gspo_policy_loss,
    inside_trust_region,
    masked_policy_loss,
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


@runtime_checkable
class MaskingSurrogate(Surrogate, Protocol):
    """A surrogate that leaves tokens out; the share that it keeps is a metric."""

    def kept(self, logprobs: Tensor, base_logprobs: Tensor, mask: Tensor) -> Tensor:
        """Return the tokens that it learns from, `[B, R]` bool."""


@dataclass(frozen=True)
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


class _Masked(_OfFields):
    """A surrogate that leaves out tokens beyond a trust region."""

    kind: ClassVar[Literal["ratio", "probability"]]

    def kept(self, logprobs: Tensor, base_logprobs: Tensor, mask: Tensor) -> Tensor:
        """Return the tokens that it learns from, `[B, R]` bool; see `inside_trust_region`."""
        return inside_trust_region(
            logprobs, base_logprobs, mask, kind=type(self).kind, **vars(self)
        )


@dataclass(frozen=True)
class MaskedRatio(_Masked):
    """Tokens whose ratio left the range are left out; see `masked_policy_loss`.

    SAO's. With the sampler as base it is IcePop's band, which also holds the updates.
    """

    kind = "ratio"
    loss = staticmethod(partial(masked_policy_loss, kind=kind))
    cliprange: float
    cliprange_high: float | None = None


@dataclass(frozen=True)
class MaskedProbability(_Masked):
    """By DPPO's bound: a token whose probability moved too far; see `inside_trust_region`."""

    kind = "probability"
    loss = staticmethod(partial(masked_policy_loss, kind=kind))
    cliprange: float
    cliprange_high: float | None = None


# By the values of `surrogate` of the hyper-parameters, which have the fields' names.
SURROGATES: dict[str, type[_OfFields]] = {
    "ppo": ClippedRatio,
    "gspo": ClippedSequenceRatio,
    "cispo": ClippedWeight,
    "masked_ratio": MaskedRatio,
    "masked_probability": MaskedProbability,
}
