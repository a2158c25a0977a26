"""Advantages of the tokens of padded rows, with a critic or with groups of responses to one prompt.

Legend: B rows, R padded response tokens. A group is the rows of one prompt.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_lightning.functional.masked import at_least_float32, zero_off_mask

# Added to the standard deviation of a group, as TRL does.
GROUP_STD_EPS = 1e-4


class Advantages(NamedTuple):
    """Result of `compute_gae`, without a graph.

    Args:
        advantages: `[B, R]` in reward units, not whitened, 0 off the mask.
        returns: `[B, R]` targets of the value model, `advantages + values` with the lambda of
            the targets, 0 off the mask.
    """

    advantages: Tensor
    returns: Tensor


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float | Tensor,
    gae_lambda_value: float | None = None,
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
        gae_lambda: 0 (one step) to 1 (Monte Carlo), or `[B]` with one number a row.
        gae_lambda_value: lambda of the advantages in the returns; None for `gae_lambda`.
        bootstrap: `[B]` value after the last token of rows that were cut off and are not
            finished, 0 for the others; None means all rows are finished.

    Returns:
        Both at least float32.

    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage
    estimation", equation 16; Yuan et al. 2025, "VC-PPO" (`gae_lambda_value`).
    """
    # A loop over columns is ten kernels for each: 5,000 launches on a GPU for 512 tokens.
    by = _by_columns if values.device.type == "cpu" else _by_doubling
    with torch.no_grad():
        rewards, values = at_least_float32(rewards), at_least_float32(values)
        advantages = by(rewards, values, mask, gamma, gae_lambda, bootstrap)
        of_values = advantages
        if gae_lambda_value is not None:
            of_values = by(rewards, values, mask, gamma, gae_lambda_value, bootstrap)
        return Advantages(advantages, zero_off_mask(of_values + values, mask))


def token_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted sum of the rewards from each valid token on (REINFORCE++).

    Args:
        rewards: `[B, R]` token rewards.
        mask: `[B, R]` bool, True on actions.
        gamma: discount, 0 to 1.

    Returns:
        `[B, R]`, at least float32, 0 off the mask, without a graph.

    Source: Hu 2025, "REINFORCE++".
    """
    nothing = torch.zeros_like(rewards)
    return compute_gae(rewards, nothing, mask, gamma=gamma, gae_lambda=1.0).returns


def length_adaptive_lambda(lengths: Tensor, *, alpha: float) -> Tensor:
    """Return `1 - 1 / max(alpha * length, 1)`, the GAE lambda of responses of these lengths.

    The weights of the TD errors of a response then add up to about `alpha * length`. The bound,
    which the source lacks, keeps short responses at 0 or more.

    Args:
        lengths: `[B]` number of tokens of each response.
        alpha: above 0; 0.05 in VAPO, 1.5 in SAO.

    Returns:
        `[B]`, 0 to below 1, at least float32.

    Source: Yue et al. 2025, "VAPO", section 4.2; Hou et al. 2026, "SAO".
    """
    return 1 - 1 / (alpha * at_least_float32(lengths)).clamp(min=1)


def group_advantages(
    scores: Tensor,
    group_ids: Tensor,
    *,
    baseline: Literal["none", "mean", "leave_one_out"],
    scale: Literal["none", "group_std"],
    eps: float = GROUP_STD_EPS,
) -> Tensor:
    """Return the score of each response relative to the other responses to its prompt.

    With the baseline "mean" `score - mean of the group`, with "leave_one_out" `score - mean of
    the others of the group`; "none" leaves the scores. The scale "group_std" divides by
    `std + eps`, the unbiased standard deviation of the group. GRPO is "mean" with "group_std",
    Dr. GRPO "mean" with "none", RLOO "leave_one_out" with "none".

    With a baseline a group of one response, and one whose scores are all equal, gets exactly 0. A
    NaN makes its whole group NaN and no other.

    Args:
        scores: `[B]`; KL that belongs into the reward is subtracted already.
        group_ids: `[B]` int64, equal for the rows of one prompt, in any order and number.
        baseline: chooses what is subtracted from each score.
        scale: chooses what the difference is divided by.
        eps: added to the standard deviation: 1e-4 in TRL, 1e-6 in verl.

    Returns:
        `[B]`, at least float32, without a graph.

    Raises:
        ValueError: if a choice is unknown, or scores are to be scaled without a baseline.

    Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2 (GRPO); Liu et al. 2025,
    "Understanding R1-Zero-like training" (Dr. GRPO); Ahmadian et al. 2024, section 3 (RLOO).
    """
    if baseline not in ("none", "mean", "leave_one_out"):
        raise ValueError(f"baseline={baseline!r} must be 'none', 'mean' or 'leave_one_out'")
    if scale not in ("none", "group_std"):
        raise ValueError(f"scale={scale!r} must be 'none' or 'group_std'")
    scores = at_least_float32(scores).detach()
    if baseline == "none":
        if scale != "none":
            raise ValueError(
                "scale='group_std' must have a baseline: equal scores have a deviation of 0; use "
                "baseline='mean'"
            )
        return scores
    counts = _group_sums(torch.ones_like(scores), group_ids)
    centred = scores - _group_sums(scores, group_ids) / counts
    advantages = centred
    others = (counts - 1).clamp(min=1)
    if baseline == "leave_one_out":
        advantages = centred * counts / others
    if scale == "group_std":
        variance = _group_sums(centred.square(), group_ids) / others
        advantages = advantages / (variance.sqrt() + eps)
    return zero_off_mask(advantages, informative_groups(scores, group_ids))


def informative_groups(
    scores: Tensor,
    group_ids: Tensor,
    scored: Tensor | None = None,
    *,
    clip: float | None = None,
) -> Tensor:
    """Return False for the rows of groups whose scores are all equal, which teach nothing.

    A group of one response is such a group. One with a NaN is not: it must not be dropped unseen.

    Args:
        scores: `[B]`.
        group_ids: `[B]` int64, equal for the rows of one prompt, in any order and number.
        scored: `[B]` bool, True on the rows whose scores are compared; None compares all.
        clip: scores are compared as advantages see them, clipped to +-clip; None for no clipping.

    Returns:
        `[B]` bool.

    Source: Yu et al. 2025, "DAPO", section 3.2 (dynamic sampling).
    """
    scores = at_least_float32(scores)
    if clip is not None:
        scores = scores.clamp(-clip, clip)
    groups, index = torch.unique(group_ids, return_inverse=True)
    low, high = (
        torch.full_like(groups, nothing, dtype=scores.dtype).scatter_reduce(
            0, index, scores if scored is None else scores.where(scored, nothing), of
        )
        for of, nothing in (("amin", torch.inf), ("amax", -torch.inf))
    )
    return ~(low >= high)[index]  # True for a NaN


def _group_sums(x: Tensor, group_ids: Tensor) -> Tensor:
    """Return, for each row, the sum over its group."""
    groups, index = torch.unique(group_ids, return_inverse=True)
    # In float64: the order in which a GPU adds does not show in float32.
    sums = torch.zeros(len(groups), dtype=torch.float64, device=x.device)
    return sums.index_add(0, index, x.double())[index].to(x.dtype)


def _by_columns(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    gae_lambda: float | Tensor,
    bootstrap: Tensor | None,
) -> Tensor:
    """Return the advantages `[B, R]`, the last column first."""
    next_advantage = torch.zeros_like(values[:, 0])  # [B]
    next_value = next_advantage if bootstrap is None else bootstrap.to(values.dtype)
    decay = gamma * gae_lambda
    advantages = torch.zeros_like(values)  # [B, R]
    for t in reversed(range(mask.shape[1])):
        valid = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + decay * next_advantage
        advantages[:, t] = zero_off_mask(advantage, valid)
        next_value = torch.where(valid, values[:, t], next_value)
        next_advantage = torch.where(valid, advantage, next_advantage)
    return advantages


def _by_doubling(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    gae_lambda: float | Tensor,
    bootstrap: Tensor | None,
) -> Tensor:
    """Return the advantages `[B, R]` in log2(R) steps, each over twice as many tokens.

    After the step of width s every column holds the sum of the s discounted TD errors from it on,
    and the discount of what follows them. Sums are taken in another order than by columns.

    Source: Hillis and Steele 1986, "Data parallel algorithms".
    """
    rows, columns = mask.shape
    last = values.new_zeros(rows) if bootstrap is None else bootstrap.to(values.dtype)
    states = torch.cat([values, last.unsqueeze(1)], 1)  # [B, R + 1]
    index = torch.arange(columns, device=mask.device).expand_as(mask)
    at_or_after = torch.where(mask, index, columns).flip(1).cummin(1).values.flip(1)
    after = pad(at_or_after[:, 1:], (0, 1), value=columns)  # [B, R] the next valid column, or R
    total = zero_off_mask(rewards + gamma * states.gather(1, after) - values, mask)
    decay = torch.as_tensor(gamma * gae_lambda, dtype=values.dtype, device=values.device)
    factor = torch.where(mask, decay.reshape(-1, 1), 1.0)
    width = 1
    while width < columns:
        total = total + factor * pad(total[:, width:], (0, width))
        factor = factor * pad(factor[:, width:], (0, width), value=1.0)
        width *= 2
    return zero_off_mask(total, mask)
