"""Rewards of tokens from scores of responses.

Legend: B rows, R padded response tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import at_least_float32, zero_off_mask
from rlhf_lightning.functional.sequences import last_token_index


def adjust_scores(
    scores: Tensor, has_eos: Tensor, *, clip: float | Tensor | None, missing_eos_penalty: float
) -> Tensor:
    """Return the scores, clipped to +-clip, less the penalty where the response did not stop.

    Clipping comes first, or it would hide the penalty. The penalty is subtracted: scaling a
    negative score towards 0 would reward being cut off.

    Args:
        scores: `[B]` in units of the reward model.
        has_eos: `[B]` bool, True where the response ended with a stop token.
        clip: largest absolute score, one number or `[B]`, or None for no clipping.
        missing_eos_penalty: what a response without stop token loses, at least 0.

    Returns:
        `[B]`, at least float32.

    Raises:
        ValueError: if a number as `clip` is not positive or `missing_eos_penalty` is negative.

    Source: Ziegler et al. 2019, released code, which replaces the score; subtracting keeps the
    order of cut-off responses.
    """
    if isinstance(clip, int | float) and not clip > 0:  # a tensor would wait for its device
        raise ValueError(f"score_clip={clip} must be positive: use about 5, or None for none")
    if not missing_eos_penalty >= 0:
        raise ValueError(
            f"missing_eos_penalty={missing_eos_penalty} must be 0 or more: it is subtracted, so a "
            "negative one pays for not stopping; use 1.0, or 0 for none"
        )
    scores = at_least_float32(scores)
    if clip is not None:
        limit: Any = clip.to(scores) if isinstance(clip, Tensor) else clip
        scores = scores.clamp(-limit, limit)
    return torch.where(has_eos, scores, scores - missing_eos_penalty)


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Return what is *added* to the scores of long responses: 0 to -1.

    0 up to `max_length - buffer` tokens, then linear down to -1 at `max_length`, and -1 beyond.

    Args:
        lengths: `[B]` number of tokens of each response.
        max_length: length in tokens from which the whole penalty applies.
        buffer: tokens before it over which the penalty grows.

    Returns:
        `[B]`, at least float32.

    Raises:
        ValueError: if `buffer` is not between 1 and `max_length`.

    Source: Yu et al. 2025, "DAPO", equation 13.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(
            f"buffer={buffer} must be between 1 and max_length={max_length}: use about a fifth"
        )
    return ((max_length - buffer - at_least_float32(lengths)) / buffer).clamp(-1, 0)


def shape_rewards(scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """Return `-kl_coef * kl` on every valid token, plus the score on the last valid one.

    So `rewards.sum(-1) == scores - kl_coef * KL of the response`, exactly. A row without a valid
    token gets nothing, not even its score. The rewards are data and carry no graph.

    Args:
        scores: `[B]` scores after `adjust_scores`.
        kl: `[B, R]` per-token KL, k1, nats.
        mask: `[B, R]` bool, True on actions, the stop token included.
        kl_coef: reward units per nat.

    Returns:
        `[B, R]`, at least float32, 0 off the mask.

    Source: Ziegler et al. 2019, equation 2; the score goes to the last action.
    """
    with torch.no_grad():
        penalties = zero_off_mask(-kl_coef * at_least_float32(kl), mask)
        positions = torch.arange(mask.shape[-1], device=mask.device)
        is_last = (positions == last_token_index(mask)[:, None]) & mask  # [B, R]
        return penalties + zero_off_mask(at_least_float32(scores)[:, None], is_last)
