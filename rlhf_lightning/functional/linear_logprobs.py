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

# Of a chunk's logits, counted in fp32: large enough for a matrix product at full speed.
CHUNK_BYTES = 32 * 2**20
# Of logits that are kept for the backward pass when there is one chunk only.
KEEP_BYTES = 32 * 2**20
# A CPU multiplies fewer rows than this by other kernels, whose rounding differs.
ROWS_MULTIPLE = 16
# Of logits that are widened to fp32 at a time, so that what follows finds them in the cache.
CACHE_BYTES = 4 * 2**20


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
        parts = []
        kept: Tensor | None = None
        for rows in chunks:
            logits = head.logits(inputs[rows])  # [C, V] in dtype
            parts.append(head.statistics(logits, tokens[rows], with_entropy))
            kept = logits if one_small and any(ctx.needs_input_grad[:3]) else None
        logprobs, entropies = (list(column) for column in zip(*parts, strict=True))
        entropy = torch.cat(entropies) if with_entropy else hidden.new_zeros(())
        ctx.save_for_backward(hidden, weight, bias, tokens, entropy, kept)
        ctx.settings = (temperature, dtype, chunks, with_entropy)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients, from d log p[token] / dz = onehot - p and dH / dz = -p (log p + H).

        The factors of a row are taken out of `[C, V]`: p alone is multiplied with the weights, and
        what belongs to one token is a row of the weights.
        """
        grad_logprobs, grad_entropy = grad_outputs
        hidden, weight, bias, tokens, entropy, kept = ctx.saved_tensors
        temperature, dtype, chunks, with_entropy = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with torch.autocast(hidden.device.type, enabled=False):
            head = _Head(weight.to(dtype), None if bias is None else bias.to(dtype), temperature)
            inputs = hidden.to(dtype)
            grad_logits = grad_logprobs / temperature  # [N], of the token's own logit
            wide = grad_logits.dtype
            grad_hidden = torch.empty(hidden.shape, dtype=wide, device=hidden.device)
            grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
            grad_bias = torch.zeros(len(weight), dtype=wide, device=hidden.device)
            for rows in chunks:
                logits = head.logits(inputs[rows]) if kept is None else kept
                factor = -grad_logits[rows, None]  # [C, 1]
                if with_entropy:
                    d_entropy = -grad_entropy[rows, None] / temperature
                    spread = head.spread(logits, factor, d_entropy, entropy[rows])
                    factor = torch.ones_like(factor)
                else:
                    spread = head.probabilities(logits)  # [C, V] in dtype
                if needs_hidden:
                    grad_hidden[rows] = factor * (spread @ head.weight)
                if grad_weight is not None:
                    grad_weight += spread.T @ (factor * inputs[rows]).to(dtype)
                if needs_bias:
                    grad_bias += spread.T.to(wide) @ factor.squeeze(-1)
            if needs_hidden:
                grad_hidden += grad_logits[:, None] * head.weight[tokens]
            if grad_weight is not None:
                grad_weight.index_add_(0, tokens, grad_logits[:, None] * inputs)
            if needs_bias:
                grad_bias.index_add_(0, tokens, grad_logits)
        return (
            grad_hidden.to(hidden.dtype) if needs_hidden else None,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            grad_bias.to(weight.dtype) if needs_bias else None,
            *[None] * 5,
        )


class _Head(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    temperature: float

    def logits(self, inputs: Tensor) -> Tensor:
        return torch.nn.functional.linear(inputs, self.weight, self.bias)

    def statistics(
        self, logits: Tensor, tokens: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return `[C]` log-probabilities of `tokens`, and entropies."""
        logprobs, entropies = [], []
        for rows in self._in_cache(logits):
            all_logprobs = self._log_softmax(logits[rows])
            logprobs.append(all_logprobs.gather(1, tokens[rows, None]).squeeze(1))
            if with_entropy:
                entropies.append(_entropy(all_logprobs))
        return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return `[C, V]` probabilities in the dtype of `logits`."""
        spread = torch.empty_like(logits)
        for rows in self._in_cache(logits):
            spread[rows] = self._log_softmax(logits[rows]).exp_()
        return spread

    def spread(self, logits: Tensor, factor: Tensor, d_entropy: Tensor, entropy: Tensor) -> Tensor:
        """Return `p (factor + d_entropy (log p + entropy))`, `[C, V]` in the dtype of `logits`."""
        spread = torch.empty_like(logits)
        for rows in self._in_cache(logits):
            logprobs = self._log_softmax(logits[rows])
            outer = (logprobs + entropy[rows, None]).mul_(d_entropy[rows]).add_(factor[rows])
            spread[rows] = logprobs.exp_().mul_(outer)
        return spread

    def _log_softmax(self, logits: Tensor) -> Tensor:
        widened = at_least_float32(logits)
        return torch.log_softmax(
            widened if self.temperature == 1 else widened / self.temperature, -1
        )

    def _in_cache(self, logits: Tensor) -> list[slice]:
        if logits.device.type != "cpu":
            return [slice(0, len(logits))]
        return _chunks(len(logits), _rows_within(CACHE_BYTES, 4 * logits.shape[1]), at_least=1)


def _entropy(logprobs: Tensor) -> Tensor:
    """Return -sum p log p; a token of probability 0 adds 0."""
    finite = logprobs.clamp_(min=torch.finfo(logprobs.dtype).min)
    return -(finite.exp() * finite).sum(-1)


def _chunks(num_rows: int, chunk_rows: int, *, at_least: int = ROWS_MULTIPLE) -> list[slice]:
    """Return slices of `chunk_rows` rows; a last one that is too short joins the one before it."""
    starts = list(range(0, num_rows, chunk_rows)) or [0]
    if len(starts) > 1 and num_rows - starts[-1] < at_least:
        starts.pop()
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], num_rows], strict=True)]
