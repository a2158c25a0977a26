"""Log-probabilities and entropies of tokens, always in float32 or better.

Legend: B rows, R positions, V vocabulary. `logits[:, t]` predicts `tokens[:, t]`: the shift has
been made before (`functional.sequences`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import at_least_float32

LARGEST = 1e-3  # log-probability that others give, after rounding in a low precision


def token_logprobs(logits: Tensor, tokens: Tensor, *, temperature: float) -> Tensor:
    """Return `log_softmax(logits / temperature)[tokens]`, in nats.

    The temperature must be the one used in sampling, for policy, old policy and reference alike;
    otherwise the gradient is that of another policy. Half-precision logits are widened first: a
    bf16 log-sum-exp is wrong by 1e-2.

    Args:
        logits: `[..., V]` raw logits, in any floating dtype.
        tokens: `[...]` int64 token ids, each below V.
        temperature: divides the logits; above 0.

    Returns:
        `[...]`, at least float32.

    Raises:
        ValueError: if `temperature` is not positive.

    Source: Ziegler et al. 2019, released code.
    """
    logprobs = log_softmax(logits, temperature)
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def token_entropy(logits: Tensor, *, temperature: float) -> Tensor:
    """Return the entropy `-sum_v p_v log p_v` of `p = softmax(logits / temperature)`, in nats.

    A token with logit -inf has probability 0 and adds 0, to the value and to the gradient.

    Args:
        logits: `[..., V]` raw logits, in any floating dtype.
        temperature: divides the logits; above 0.

    Returns:
        `[...]`, at least float32.

    Raises:
        ValueError: if `temperature` is not positive.
    """
    logprobs = log_softmax(logits, temperature)
    impossible = torch.isneginf(logprobs)
    return -(logprobs.exp() * logprobs.masked_fill(impossible, 0.0)).sum(dim=-1)


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Return log-probabilities of all tokens `[..., V]`; see `token_logprobs`."""
    if not temperature > 0:
        raise ValueError(
            f"temperature={temperature} must be positive: use 1.0, or sample greedily in an "
            "evaluation instead of setting it to 0"
        )
    return torch.log_softmax(at_least_float32(logits) / temperature, dim=-1)
