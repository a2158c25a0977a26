"""Distillation on the policy's own responses: how far the policy, the student, is from a teacher.

Legend: B rows, R response, N positions, V vocabulary, H hidden size, C positions of a chunk.

By the sampled tokens alone the teacher is an advantage. Over the whole vocabulary the divergence
is a loss; then `[C, V]` logits of both models are made, reduced to one number a position and
dropped, and made again in the backward pass: no tensor is `[N, V]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhf_lightning.functional.logprobs import log_softmax
from rlhf_lightning.functional.masked import at_least_float32, zero_off_mask

DIVERGENCES = ("reverse", "forward", "jensen_shannon")
# States `[C, H]` of a model -> its logits `[C, V]`.
Logits = Callable[[Tensor], Tensor]


def distillation_advantages(
    logprobs: Tensor,
    teacher_logprobs: Tensor,
    mask: Tensor,
    *,
    teacher_coef: float,
    advantages: Tensor | None = None,
) -> Tensor:
    """Return `advantages + teacher_coef * (teacher_logprobs - logprobs)`, 0 off the mask.

    With tokens sampled from the student this is the policy gradient of -KL(student || teacher), a
    token's share of it alone: what a token does to later ones is left out.

    Args:
        logprobs: `[B, R]` of the sampled tokens under the student, nats; without a gradient.
        teacher_logprobs: `[B, R]` of the same under the teacher, at the same temperature.
        mask: `[B, R]` bool, True on actions.
        teacher_coef: weight of the teacher.
        advantages: `[B, R]` of a reward; None without one.

    Returns:
        `[B, R]`, at least float32, without a gradient.

    Source: Lu et al. 2025, "On-policy distillation" (Thinking Machines).
    """
    gap = at_least_float32(teacher_logprobs) - at_least_float32(logprobs)
    total = teacher_coef * gap if advantages is None else advantages + teacher_coef * gap
    return zero_off_mask(total, mask).detach()


def vocabulary_divergence(
    logprobs: Tensor, teacher_logprobs: Tensor, *, kind: str, weight: float
) -> Tensor:
    """Return the divergence of two distributions over the last dimension, nats.

    "reverse" is KL(student || teacher), "forward" is KL(teacher || student), "jensen_shannon" is
    `weight KL(teacher || M) + (1 - weight) KL(student || M)` with the mixture
    `M = weight teacher + (1 - weight) student`. A token of probability 0 adds 0 to the sum that it
    weighs, and to the gradient; where the other side alone gives it 0, a KL is infinite.

    Args:
        logprobs: `[..., V]` log-probabilities of the student.
        teacher_logprobs: `[..., V]` log-probabilities of the teacher.
        kind: one of `DIVERGENCES`.
        weight: of the teacher, above 0 and below 1; only for "jensen_shannon".

    Returns:
        `[...]`, with a gradient where `logprobs` have one.

    Raises:
        ValueError: for another kind.

    Source: Agarwal et al. 2024, "On-policy distillation of language models" (GKD), section 2.
    """
    if kind == "reverse":
        return _kl(logprobs, teacher_logprobs)
    if kind == "forward":
        return _kl(teacher_logprobs, logprobs)
    if kind == "jensen_shannon":
        # Finite, for the gradient of a token that both give 0.
        own = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)
        mixture = torch.logaddexp(teacher_logprobs + math.log(weight), own + math.log1p(-weight))
        of_teacher, of_student = _kl(teacher_logprobs, mixture), _kl(logprobs, mixture)
        return weight * of_teacher + (1 - weight) * of_student
    raise ValueError(f"kind={kind!r} must be one of {', '.join(DIVERGENCES)}")


class Distilled(NamedTuple):
    """Divergence from the teacher and log-probability of the student's token, nats, `[N]` each."""

    divergence: Tensor
    logprobs: Tensor


def chunked_divergence(
    states: Tensor,
    teacher_states: Tensor,
    tokens: Tensor,
    *,
    logits: Logits,
    teacher_logits: Logits,
    kind: str,
    weight: float,
    temperature: float,
    chunk_rows: int,
) -> Distilled:
    """Return `vocabulary_divergence` at each position, and the student's log-probability there.

    Where one model has more columns than the other, as models of one tokenizer but another padding
    of the table do, the divergence is over the columns of both.

    Args:
        states: `[N, H]` of the student, which predict `tokens`.
        teacher_states: `[N, H']` of the teacher, at the same positions.
        tokens: `[N]` int64.
        logits: gives `[C, V]` of `states`; called in the forward and in the backward pass.
        teacher_logits: likewise of `teacher_states`; no gradient goes through it.
        kind: see `vocabulary_divergence`.
        weight: see `vocabulary_divergence`.
        temperature: divides the logits of both; above 0.
        chunk_rows: C.
    """

    def of_chunk(own: Tensor, others: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        made = logits(own)  # [C, V]
        with torch.no_grad():
            wanted = teacher_logits(others)
            width = min(made.shape[1], wanted.shape[1])
            wanted = log_softmax(wanted[:, :width], temperature)
        logprobs = log_softmax(made, temperature)
        shared = logprobs if made.shape[1] == width else log_softmax(made[:, :width], temperature)
        found = vocabulary_divergence(shared, wanted, kind=kind, weight=weight)
        return found, logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1)

    starts = list(range(chunk_rows, len(states), chunk_rows))
    chunks = zip(*(x.tensor_split(starts) for x in (states, teacher_states, tokens)), strict=True)
    parts = [
        checkpoint(of_chunk, *rows, use_reentrant=False, preserve_rng_state=False)
        for rows in chunks
    ]
    divergences, logprobs = zip(*parts, strict=True)
    return Distilled(torch.cat(divergences), torch.cat(logprobs))


def _kl(logprobs: Tensor, others: Tensor) -> Tensor:
    impossible = torch.isneginf(logprobs)
    return (logprobs.exp() * (logprobs - others).masked_fill(impossible, 0.0)).sum(-1)
