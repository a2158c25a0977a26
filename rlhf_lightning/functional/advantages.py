"""Generalised advantage estimation over the valid tokens of padded rows.

Legend: B rows, R padded response tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import at_least_float32, zero_off_mask


class Advantages(NamedTuple):
    """Result of `compute_gae`, without a graph.

    Args:
        advantages: `[B, R]` in reward units, not whitened, 0 off the mask.
        returns: `[B, R]` targets of the value model, `advantages + values`, 0 off the mask.
    """

    advantages: Tensor
    returns: Tensor


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    bootstrap: Tensor | None = None,
) -> Advantages:
    """Return advantages and returns by the backward recursion over valid tokens.

    `delta_t = r_t + gamma V_next - V_t` and `A_t = delta_t + gamma gae_lambda A_next`, where next
    is the next *valid* token of the row: a hole in the mask (a tool's output) is passed over and
    nothing that stands off the mask is read. After the last valid token V is `bootstrap`, or 0.

    Args:
        rewards: `[B, R]` token rewards.
        values: `[B, R]` values of the state before token t, in reward units.
        mask: `[B, R]` bool, True on actions.
        gamma: discount, 0 to 1.
        gae_lambda: 0 (one step) to 1 (Monte Carlo).
        bootstrap: `[B]` value after the last token of rows that were cut off and are not
            finished, 0 for the others; None means all rows are finished.

    Returns:
        Both at least float32.

    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage
    estimation", equation 16.
    """
    with torch.no_grad():
        rewards, values = at_least_float32(rewards), at_least_float32(values)
        next_advantage = torch.zeros_like(values[:, 0])  # [B]
        next_value = next_advantage if bootstrap is None else bootstrap.to(values.dtype)
        advantages = torch.zeros_like(values)  # [B, R]
        for t in reversed(range(mask.shape[1])):
            valid = mask[:, t]
            delta = rewards[:, t] + gamma * next_value - values[:, t]
            advantage = delta + gamma * gae_lambda * next_advantage
            advantages[:, t] = zero_off_mask(advantage, valid)
            next_value = torch.where(valid, values[:, t], next_value)
            next_advantage = torch.where(valid, advantage, next_advantage)
        return Advantages(advantages, zero_off_mask(advantages + values, mask))
