"""Masks, indices and the only off-by-one slices of the code base.

Legend: B rows, P padded prompt tokens, R padded response tokens, T padded tokens of a sequence.
A causal model's output at position t predicts the token at t + 1; every function that crosses
this step stands here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import zero_off_mask

IGNORED_LABEL = -100


def response_mask(responses: Tensor, stop_ids: Sequence[int]) -> Tensor:
    """Return True up to and including the first stop token of each row.

    Stopping is an action: the policy gets credit for it only if the stop token counts. The mask
    comes from stop tokens and never from `ids != pad`, so it is right when pad is the stop token
    and when pad was sampled as an ordinary token. A row without a stop token counts whole.

    Args:
        responses: `[B, R]` sampled token ids.
        stop_ids: ids that end a response; may be empty.

    Returns:
        `[B, R]` bool.

    Source: Ziegler et al. 2019, released code (truncation after the first stop token).
    """
    stops = torch.tensor(list(stop_ids), dtype=responses.dtype, device=responses.device)
    is_stop = torch.isin(responses, stops).long()  # [B, R]
    stops_before = is_stop.cumsum(dim=-1) - is_stop
    return stops_before == 0


def last_token_index(attention_mask: Tensor) -> Tensor:
    """Return the index of the last True of each row, for any padding side.

    This is the position a reward model scores, in training and in PPO alike. It is read from the
    mask because ids cannot tell padding from a final EOS. A row without any True gives 0.

    Args:
        attention_mask: `[B, T]` bool, True on real tokens (0/1 integers work too).

    Returns:
        `[B]` int64.
    """
    positions = torch.arange(attention_mask.shape[-1], device=attention_mask.device)
    return zero_off_mask(positions.expand(attention_mask.shape), attention_mask.bool()).amax(dim=-1)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Return `max(cumsum(mask) - 1, 0)`: the first real token of each row is at position 0.

    Models with absolute positions give other log-probabilities under left padding without it,
    in the old and the new pass alike, so that no ratio would show it.

    Args:
        attention_mask: `[B, T]` bool, True on real tokens (0/1 integers work too).

    Returns:
        `[B, T]` int64; padding after the last real token repeats its position.
    """
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def next_token_labels(input_ids: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the label of each position: the next token where that token is learnt, else -100.

    `labels[:, t] = input_ids[:, t + 1] if loss_mask[:, t + 1] else -100`; the last column is -100.

    Args:
        input_ids: `[B, T]` token ids.
        loss_mask: `[B, T]` bool, True on the tokens that are learnt (response and its EOS).

    Returns:
        `[B, T]` int64, aligned with the logits: `logits[:, t]` predicts `labels[:, t]`.
    """
    labels = torch.full_like(input_ids, IGNORED_LABEL)
    labels[:, :-1] = torch.where(loss_mask[:, 1:], input_ids[:, 1:], IGNORED_LABEL)
    return labels


def response_state_index(prompt_length: Tensor, response_length: int) -> Tensor:
    """Return the positions whose hidden states predict the response tokens.

    `index[b, t] = max(prompt_length[b] - 1 + t, 0)`: response token t is at `prompt_length[b] + t`,
    and the state before it is one position earlier. Log-probability, entropy and value of token t
    are all read there.

    Args:
        prompt_length: `[B]` int64, real prompt tokens of rows padded on the right.
        response_length: R, the padded width of the responses.

    Returns:
        `[B, R]` int64, for `Tensor.gather` along the sequence.
    """
    steps = torch.arange(response_length, device=prompt_length.device)  # [R]
    return (prompt_length[:, None] - 1 + steps).clamp(min=0)
