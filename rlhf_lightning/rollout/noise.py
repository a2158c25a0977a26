"""Randomness that belongs to a row, not to a process.

A uniform number is a pure function of (seed, purpose, iteration, row, position). Batch order,
padding, rows that leave the batch, an evaluation in between and the number of processes change
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

PURPOSES = {
    "rollout": 1,
    "evaluation": 2,
    "normalization": 3,
    "candidates": 4,
    "minibatches": 5,
    "best_of": 6,
    "generate": 7,
}


_ALL = (1 << 64) - 1  # 64 bits set


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


def _absorb(state: int, key: int) -> int:
    """Return `_mix((state ^ key) + _GOLDEN)` of numbers, which need no device."""
    x = ((state ^ key) + _GOLDEN) & _ALL
    x = ((x ^ (x >> 30)) * _MIX_1) & _ALL
    x = ((x ^ (x >> 27)) * _MIX_2) & _ALL
    return x ^ (x >> 31)


@dataclass(frozen=True)
class RowNoise:
    """Uniform noise keyed by row.

    Args:
        seed: seed of the run.
        purpose: one of `PURPOSES`; different purposes never share numbers.
        iteration: number of the rollout.
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
        # Every key is mixed before the next one is added. The seed too: added to the purpose as it
        # is, seed 2 of purpose 1 would be seed 1 of purpose 2.
        stream = 0
        for number in (self.seed, PURPOSES[self.purpose], self.iteration):
            stream = _absorb(stream, number)
        state = torch.full_like(row_ids, _signed(stream), dtype=torch.int64)
        for key in (row_ids, position):
            state = _mix((state ^ key) + _GOLDEN)
        return _shift_right(state, 11).double() * 2.0**-53


# The cumulative sum is taken in two levels: over blocks of this many tokens, then inside one.
_BLOCK = 256


class Sampled(NamedTuple):
    """One sampled token per row.

    Args:
        tokens: `[B]` int64 token ids.
        logprobs: `[B]` float32, of each token under the distribution that it was drawn from,
            `log softmax(logits / temperature)` of the logits as they were given, in nats. At
            temperature 0 there is one possible token, and it is 0.
        finite: `[B]` bool, False where the logits held a NaN and the row means nothing.
    """

    tokens: Tensor
    logprobs: Tensor
    finite: Tensor


def sample(logits: Tensor, uniform: Tensor, *, temperature: float) -> Sampled:
    """Return one token a row by inverse-CDF sampling of softmax(logits / temperature).

    Args:
        logits: `[B, V]` raw logits, finite or -inf.
        uniform: `[B]` float64 in [0, 1).
        temperature: divides the logits; 0 takes the most likely token (the first of equals).

    Raises:
        ValueError: if a row of logits holds a NaN, or the temperature is negative.
    """
    sampled = sample_unchecked(logits, uniform, temperature=temperature)
    check_finite(sampled.finite)
    return sampled


def check_finite(finite: Tensor) -> None:
    """Raise unless `finite` (bool, any shape) is True everywhere; waits for the device."""
    if not bool(finite.all()):
        raise ValueError("the policy's logits are not finite: its weights have diverged")


def sample_unchecked(logits: Tensor, uniform: Tensor, *, temperature: float) -> Sampled:
    """Return what `sample` returns without looking at `finite`; never waits for a GPU."""
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must be at least 0 (0 = most likely token)")
    top = logits.amax(-1, keepdim=True)  # [B, 1]
    if temperature == 0:
        certain = torch.zeros_like(top.squeeze(-1), dtype=torch.float32)
        return Sampled(logits.argmax(-1), certain, top.squeeze(-1).isfinite())
    rows, vocabulary = logits.shape
    blocks = -(-vocabulary // _BLOCK)
    weights = logits.new_empty((rows, blocks * _BLOCK), dtype=torch.float32)
    weights[:, vocabulary:] = 0.0
    inner = weights[:, :vocabulary]
    inner.copy_(logits).sub_(top)
    if temperature != 1.0:
        inner.div_(temperature)
    inner.exp_()  # [B, V], the largest is 1
    weights = weights.view(rows, blocks, _BLOCK)
    sums = weights.sum(-1).double()
    cdf = sums.cumsum(-1)  # float64: 50k float32 terms would drift by 1e-4
    total = cdf[:, -1:]
    zero = torch.zeros_like(total)
    target = _below(uniform.unsqueeze(-1) * total, total, zero)
    block = torch.searchsorted(cdf, target, right=True)  # [B, 1], the one that holds the target
    block = block.clamp(max=blocks - 1)  # a NaN finds none
    inside = weights.gather(1, block.unsqueeze(-1).expand(-1, -1, _BLOCK)).squeeze(1)
    inside_cdf = inside.double().cumsum(-1)
    rest = target - (cdf.gather(1, block) - sums.gather(1, block))
    rest = _below(rest.clamp(min=0.0), inside_cdf[:, -1:], zero)
    place = torch.searchsorted(inside_cdf, rest, right=True)
    token = torch.add(place, block, alpha=_BLOCK).clamp(max=vocabulary - 1)
    weight = inside.gather(1, place.clamp(max=_BLOCK - 1))
    logprob = (weight / total).log().float()  # in float64, as `total` is
    return Sampled(token.squeeze(-1), logprob.squeeze(-1), (total < torch.inf).squeeze(-1))


def _below(x: Tensor, bound: Tensor, zero: Tensor) -> Tensor:
    """Return `x`, or the largest number under `bound` where rounding put it at or above."""
    return torch.minimum(x, torch.nextafter(bound, zero))
