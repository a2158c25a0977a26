"""Log-probabilities and gradients of a chunk of logits, for a compiler to fuse into few passes.

Plain, each step reads and writes a table in fp32. The formulas are those of `linear_logprobs`; a
token's own column is found by comparing instead of by a scatter, which would be a pass of its own.

Legend: C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import at_least_float32

logger = logging.getLogger(__name__)
T = TypeVar("T")
BACKEND = "inductor"
_fails = False
_ran: set[Callable[..., Any]] = set()  # functions whose first call has succeeded


def statistics(
    logits: Tensor, tokens: Tensor, temperature: float, softcap: float | None, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return `[C]` log-probabilities of `tokens`, and entropies if asked for."""
    logprobs = _log_softmax(logits, temperature, softcap)
    own = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    if not with_entropy:
        return own, None
    finite = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)
    return own, -(finite.exp() * finite).sum(-1)


def errors(logits: Tensor, tokens: Tensor, temperature: float, softcap: float | None) -> Tensor:
    """Return `p - onehot` `[C, V]` in the dtype of `logits`, of the head's output."""
    logprobs = _log_softmax(logits, temperature, softcap)
    error = logprobs.exp() - _own(logits, tokens).to(logprobs.dtype)
    return _uncapped(error, logits, softcap)


def spread(
    logits: Tensor,
    tokens: Tensor,
    factor: Tensor,
    d_entropy: Tensor,
    entropy: Tensor,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Return `factor (p - onehot) + d_entropy p (log p + entropy)`, as `errors` does."""
    logprobs = _log_softmax(logits, temperature, softcap)
    mixed = logprobs.exp() * ((logprobs + entropy.unsqueeze(1)) * d_entropy + factor)
    return _uncapped(torch.where(_own(logits, tokens), mixed - factor, mixed), logits, softcap)


def run_compiled(function: Callable[..., T], logits: Tensor, *arguments: Any) -> T | None:
    """Return what a function of this file gives, compiled once for any C.

    None where its first call fails, as on a machine without a compiler, which is said once.
    """
    global _fails
    if _fails:
        return None
    for argument in (logits, *arguments):
        if isinstance(argument, Tensor):
            torch._dynamo.maybe_mark_dynamic(argument, 0)
    try:
        found: T = _compiled(function, BACKEND)(logits, *arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of Dynamo, Inductor, Triton or the C compiler behind it
        if function in _ran:
            raise
        _fails = True
        first = (str(error).splitlines() or [""])[0]
        logger.warning("The head is not compiled, which costs time alone: %s", first)
        return None
    _ran.add(function)
    return found


@cache
def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(function, backend=backend)


def _own(logits: Tensor, tokens: Tensor) -> Tensor:
    columns = torch.arange(logits.shape[1], device=logits.device)
    return columns == tokens.unsqueeze(1)


def _log_softmax(logits: Tensor, temperature: float, softcap: float | None) -> Tensor:
    widened = at_least_float32(logits)
    if softcap is not None:
        widened = softcap * torch.tanh(widened / softcap)
    return torch.log_softmax(widened / temperature, -1)


def _uncapped(grad: Tensor, logits: Tensor, softcap: float | None) -> Tensor:
    if softcap is not None:
        grad = grad * (1 - torch.tanh(at_least_float32(logits) / softcap).square())
    return grad.to(logits.dtype)
