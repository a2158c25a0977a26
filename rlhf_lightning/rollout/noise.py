"""Randomness that belongs to a row, not to a process.

A uniform number is a pure function of (seed, purpose, iteration, row, position). Batch order,
padding, rows that leave the batch, an evaluation in between and the number of processes change
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

PURPOSES = {"rollout": 1, "evaluation": 2, "normalization": 3, "candidates": 4, "minibatches": 5}


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64 that wraps (Steele et al. 2014, figure 12)."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


@dataclass(frozen=True)
class RowNoise:
    """Uniform noise keyed by row.

    Args:
        seed: of the run.
        purpose: one of `PURPOSES`; different purposes never share numbers.
        iteration: counts rollouts.
    """

    seed: int
    purpose: str = "rollout"
    iteration: int = 0

    def at_iteration(self, iteration: int) -> Self:
        """Return the same noise for another iteration."""
        return replace(self, iteration=iteration)

    def uniform(self, row_ids: Tensor, position: int | Tensor) -> Tensor:
        """Return `[B]` float64 in [0, 1) for rows `row_ids` `[B]`.

        `position` is that of the token in its response, or the epoch whose minibatches are dealt.
        """
        state = torch.full_like(row_ids, self.seed, dtype=torch.int64)
        for key in (PURPOSES[self.purpose], self.iteration, row_ids, position):
            state = _mix((state ^ key) + _GOLDEN)
        return _shift_right(state, 11).double() * 2.0**-53


def sample(logits: Tensor, uniform: Tensor, *, temperature: float) -> Tensor:
    """Return one token a row by inverse-CDF sampling of softmax(logits / temperature).

    Args:
        logits: `[B, V]`.
        uniform: `[B]` float64 in [0, 1).
        temperature: divides the logits.

    Raises:
        ValueError: if a row of logits holds a NaN.
    """
    probabilities = (logits.float() / temperature).softmax(-1).double()
    cdf = probabilities.cumsum(-1)  # float64: 50k float32 terms would drift by 1e-4
    total = cdf[:, -1:]
    if not bool(torch.isfinite(total).all()):
        raise ValueError("the policy's logits are not finite: its weights have diverged")
    tokens = torch.searchsorted(cdf, uniform.unsqueeze(-1) * total, right=True).squeeze(-1)
    return tokens.clamp(max=logits.shape[-1] - 1)
