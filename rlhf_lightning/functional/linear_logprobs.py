"""Log-probabilities straight from hidden states, without ever holding all logits.

Legend: N positions, H hidden size, V vocabulary, C positions of a chunk.

The head's output `[N, V]` is the largest tensor of a language model: 152k words at 4,096 positions
are 2.5 GB in fp32, several times over with the graph of a softmax. Here `[C, V]` is made, reduced
to one number a position and dropped; the backward pass makes it again, so memory does not depend
on N x V. A single small chunk is kept in the compute dtype instead, which saves that work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import at_least_float32

# Of a chunk's widened logits. Smaller ones stay in the cache, larger ones multiply faster.
CHUNK_BYTES = 32 * 2**20
# Of logits that are kept for the backward pass when there is one chunk only.
KEEP_BYTES = 32 * 2**20
# A CPU multiplies fewer rows than this by other kernels, whose rounding differs.
ROWS_MULTIPLE = 16


class LinearLogprobs(NamedTuple):
    """Log-probability of each token `[N]` and, if asked for, entropy `[N]`; nats."""

    logprobs: Tensor
    entropy: Tensor | None


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float,
    with_entropy: bool = False,
    chunk_rows: int | None = None,
) -> LinearLogprobs:
    """Return `log_softmax((hidden @ weight.T + bias) / temperature)[tokens]` and its entropy.

    Under autocast the product is taken in its dtype, everything after it in float32 or better, as
    `token_logprobs` of the same logits would. Gradients reach `hidden`, `weight` and `bias`.

    Args:
        hidden: `[N, H]` states that predict `tokens`.
        weight: `[V, H]` of the head.
        tokens: `[N]` int64.
        bias: `[V]` of the head.
        temperature: positive; divides the logits.
        with_entropy: also return the entropy of each distribution, with its gradient.
        chunk_rows: C; None takes what fits in 32 MiB.

    Raises:
        ValueError: if `temperature` is not positive.

    Source: the chunking follows Hsu et al. 2024 (Liger Kernel, fused linear cross-entropy).
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive: use 1.0")
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    if chunk_rows is None:
        chunk_rows = _rows_within(CHUNK_BYTES, 4 * len(weight))
    with torch.autocast(device, enabled=False):
        logprobs, entropy = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, tokens, float(temperature), dtype, chunk_rows, with_entropy
        )
    return LinearLogprobs(logprobs, entropy if with_entropy else None)


def _rows_within(num_bytes: int, row_bytes: int) -> int:
    return max(num_bytes // row_bytes // ROWS_MULTIPLE, 1) * ROWS_MULTIPLE


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: float,
        dtype: torch.dtype,
        chunk_rows: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(weight.to(dtype), None if bias is None else bias.to(dtype), temperature)
        inputs = hidden.to(dtype)
        chunks = _chunks(len(inputs), chunk_rows)
        one_small = len(chunks) == 1 and len(inputs) * len(weight) * dtype.itemsize <= KEEP_BYTES
        normalizers, logprobs, entropies = [], [], []
        kept: Tensor | None = None
        for rows in chunks:
            logits = head.logits(inputs[rows])  # [C, V] in dtype
            scaled = head.scaled(logits)  # [C, V] widened
            normalizer = scaled.logsumexp(-1)  # [C]
            normalizers.append(normalizer)
            logprobs.append(_pick(scaled, tokens[rows]) - normalizer)
            if with_entropy:
                entropies.append(_entropy(scaled, normalizer))
            kept = logits if one_small and ctx.needs_input_grad[0] else None
        normalizer = torch.cat(normalizers)
        entropy = torch.cat(entropies) if with_entropy else normalizer.new_zeros(())
        ctx.save_for_backward(hidden, weight, bias, tokens, normalizer, entropy, kept)
        ctx.settings = (temperature, dtype, chunks, with_entropy)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients, from d log p[token] / dz = onehot - p and dH / dz = -p (log p + H)."""
        grad_logprobs, grad_entropy = grad_outputs
        hidden, weight, bias, tokens, normalizer, entropy, kept = ctx.saved_tensors
        temperature, dtype, chunks, with_entropy = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with torch.autocast(hidden.device.type, enabled=False):
            head = _Head(weight.to(dtype), None if bias is None else bias.to(dtype), temperature)
            inputs = hidden.to(dtype)
            grad_hidden = torch.empty_like(hidden) if needs_hidden else None
            grad_weight: Tensor | None = None
            grad_bias: Tensor | None = None
            for rows in chunks:
                logits = head.logits(inputs[rows]) if kept is None else kept
                grad = head.scaled(logits).sub_(normalizer[rows, None])  # log p, [C, V]
                factor = -grad_logprobs[rows, None]
                if with_entropy:
                    outer = grad + entropy[rows, None]
                    grad.exp_().mul_(factor - grad_entropy[rows, None] * outer)
                    del outer
                else:
                    grad.exp_().mul_(factor)
                grad.scatter_add_(1, tokens[rows, None], -factor)
                if temperature != 1:
                    grad.div_(temperature)
                narrow = grad.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = (narrow @ head.weight).to(hidden.dtype)
                if needs_weight:
                    grad_weight = _add(grad_weight, narrow.T @ inputs[rows], weight.dtype)
                if needs_bias:
                    grad_bias = _add(grad_bias, grad.sum(0), weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


class _Head(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    temperature: float

    def logits(self, inputs: Tensor) -> Tensor:
        return torch.nn.functional.linear(inputs, self.weight, self.bias)

    def scaled(self, logits: Tensor) -> Tensor:
        """Return new, widened logits over the temperature, which may be changed in place."""
        widened = at_least_float32(logits)
        widened = widened.clone() if widened is logits else widened
        return widened if self.temperature == 1 else widened.div_(self.temperature)


def _pick(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _entropy(logits: Tensor, normalizer: Tensor) -> Tensor:
    """Return -sum p log p; destroys `logits`."""
    logprobs = logits.sub_(normalizer.unsqueeze(-1)).clamp_(min=torch.finfo(logits.dtype).min)
    return -(logprobs.exp() * logprobs).sum(-1)


def _chunks(num_rows: int, chunk_rows: int) -> list[slice]:
    """Return slices of `chunk_rows` rows; a short last one joins the one before it."""
    starts = list(range(0, num_rows, chunk_rows)) or [0]
    if len(starts) > 1 and num_rows - starts[-1] < ROWS_MULTIPLE:
        starts.pop()
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], num_rows], strict=True)]


def _add(total: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
    part = part.to(dtype)
    return part if total is None else total.add_(part)
