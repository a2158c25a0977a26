"""Log-probabilities straight from hidden states, without ever holding all logits.

Legend: N positions, H hidden size, V vocabulary, C positions of a chunk.

The head's output `[N, V]` is the largest tensor of a language model: 152k words at 4,096 positions
are 2.5 GB in fp32, several times over with the graph of a softmax. Here `[C, V]` is made, reduced
to one number a position and dropped; the backward pass makes it again, so memory does not depend
on N x V. Few logits are kept in the compute dtype instead, which saves that work.

The functions `chunk_*` are for a compiler to fuse into few passes: plain, each step reads and
writes a table in fp32. Their formulas are those of `_Head`; a token's own column is found by
comparing instead of by a scatter, which would be a pass of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import at_least_float32

logger = logging.getLogger(__name__)
T = TypeVar("T")
BACKEND = "inductor"
_fails = False
_ran: set[Callable[..., Any]] = set()  # functions whose first call has succeeded


def chunk_statistics(
    logits: Tensor, tokens: Tensor, temperature: float, softcap: float | None, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return `[C]` log-probabilities of `tokens`, and entropies if asked for."""
    logprobs = _log_softmax(logits, temperature, softcap)
    own = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    if not with_entropy:
        return own, None
    finite = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)
    return own, -(finite.exp() * finite).sum(-1)


def chunk_errors(
    logits: Tensor, tokens: Tensor, temperature: float, softcap: float | None
) -> Tensor:
    """Return `p - onehot` `[C, V]` in the dtype of `logits`, of the head's output."""
    logprobs = _log_softmax(logits, temperature, softcap)
    error = logprobs.exp() - _own(logits, tokens).to(logprobs.dtype)
    return _uncapped(error, logits, softcap)


def chunk_spread(
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


class Sizes(NamedTuple):
    """Bytes of logits: of a chunk, counted in fp32, and of all that are kept for the backward."""

    chunk: int
    kept: int


# Large enough for a matrix product at full speed, small enough for what is held beside a model.
ON_CPU = Sizes(chunk=32 * 2**20, kept=64 * 2**20)
# Each chunk reads and writes the whole gradient of the head once more: 64 rows, of which 32 MiB are
# at a vocabulary of 128k, spend nine tenths of their time on that, 2,000 less than a tenth. Of a
# single chunk the backward pass holds the logits anyway.
ON_GPU = Sizes(chunk=2**30, kept=2**30)
# A CPU multiplies fewer rows than this by other kernels, whose rounding differs.
ROWS_MULTIPLE = 16
# Of logits that are widened to fp32 at a time, so that what follows finds them in the cache.
CACHE_BYTES = 4 * 2**20

Accumulate = Callable[[Tensor, Tensor, Tensor], Tensor | None]


def _on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def _sizes(device: torch.device) -> Sizes:
    return ON_CPU if _on_cpu(device) else ON_GPU


def rows_of_chunk(device: torch.device, vocabulary: int, *, tables: int = 1) -> int:
    """Return how many positions a chunk has of which so many tables `[C, V]` are held in fp32."""
    return _rows_within(_sizes(device).chunk, 4 * vocabulary * tables)


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
    softcap: float | None = None,
    with_entropy: bool = False,
    chunk_rows: int | None = None,
    accumulate: Accumulate | None = None,
    product_dtype: Callable[[torch.dtype], torch.dtype] | None = None,
    compiled: bool = False,
) -> LinearLogprobs:
    """Return `log_softmax((hidden @ weight.T + bias) / temperature)[tokens]` and its entropy.

    Under autocast the product is taken in its dtype, everything after it in float32 or better, as
    `token_logprobs` of the same logits would. Gradients reach `hidden`, `weight` and `bias`.

    Args:
        hidden: `[N, H]` states that predict `tokens`.
        weight: `[V, H]` weight of the head.
        tokens: `[N]` int64 tokens whose log-probability is returned.
        bias: `[V]` bias of the head; None if it has none.
        temperature: positive; divides the logits.
        softcap: c of models whose logits are c tanh(z / c) of the head's output z, before the
            temperature divides them (Gemma 2); None leaves them as they are.
        with_entropy: also return the entropy of each distribution, with its gradient.
        chunk_rows: C; None takes what fits in 32 MiB of a CPU, or in 1 GiB of a GPU.
        accumulate: takes `weight` and of each chunk the two factors `[C, V]` and `[C, H]` of its
            gradient, in the compute dtype; returns None if it has added their product, or the
            product for autograd. None is autograd's way.
        product_dtype: the dtype of autocast -> another one to multiply in; None keeps it.
        compiled: compile what lies between the products, if this machine can.

    Raises:
        ValueError: if `temperature` is not positive.

    Source: the chunking follows Hsu et al. 2024 (Liger Kernel, fused linear cross-entropy).
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive: use 1.0")
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    if product_dtype is not None:
        dtype = product_dtype(dtype)
    if chunk_rows is None:
        chunk_rows = rows_of_chunk(hidden.device, len(weight))
    with torch.autocast(device, enabled=False):
        logprobs, entropy = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden,
            weight,
            bias,
            tokens,
            float(temperature),
            softcap,
            dtype,
            chunk_rows,
            with_entropy,
            accumulate,
            compiled,
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
        softcap: float | None,
        dtype: torch.dtype,
        chunk_rows: int,
        with_entropy: bool,
        accumulate: Accumulate | None,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        head = _Head.of(weight, bias, dtype, temperature, softcap, compiled)
        inputs = hidden.to(dtype)
        chunks = _chunks(len(inputs), chunk_rows)
        few = len(inputs) * len(weight) * dtype.itemsize <= _sizes(hidden.device).kept
        keep = few and any(ctx.needs_input_grad[:3])
        parts, kept = [], []
        for rows in chunks:
            logits = head.logits(inputs[rows])  # [C, V] in dtype
            parts.append(head.statistics(logits, tokens[rows], with_entropy))
            if keep:
                kept.append(logits)
        logprobs, entropies = (list(column) for column in zip(*parts, strict=True))
        entropy = torch.cat(entropies) if with_entropy else hidden.new_zeros(())
        ctx.save_for_backward(hidden, weight, bias, tokens, entropy, *kept)
        ctx.settings = (temperature, softcap, dtype, chunks, with_entropy, accumulate, compiled)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients, from d log p[token] / dz = onehot - p and dH / dz = -p (log p + H).

        Without the entropy, the factor of a row is taken out of `[C, V]`. With a soft cap, z is the
        capped logit c tanh(y / c), and dz / dy = 1 - (z / c)^2.
        """
        grad_logprobs, grad_entropy = grad_outputs
        hidden, weight, bias, tokens, entropy, *kept = ctx.saved_tensors
        temperature, softcap, dtype, chunks, with_entropy, accumulate, compiled = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with torch.autocast(hidden.device.type, enabled=False):
            head = _Head.of(weight, bias, dtype, temperature, softcap, compiled)
            inputs = hidden.to(dtype)
            grad_logits = grad_logprobs / temperature  # [N], of the token's own logit
            wide = grad_logits.dtype
            grad_hidden = torch.empty(hidden.shape, dtype=wide, device=hidden.device)
            grad_weight = _Sum(weight, accumulate)
            grad_bias = torch.zeros(len(weight), dtype=wide, device=hidden.device)
            for rows in chunks:
                logits = kept.pop(0) if kept else head.logits(inputs[rows])
                factor = -grad_logits[rows, None]  # [C, 1]
                if with_entropy:
                    d_entropy = -grad_entropy[rows, None] / temperature
                    spread = head.spread(logits, tokens[rows], factor, d_entropy, entropy[rows])
                    factor = torch.ones_like(factor)
                else:
                    spread = head.errors(logits, tokens[rows])  # [C, V] in dtype
                del logits
                if needs_hidden:
                    grad_hidden[rows] = factor * (spread @ head.weight)
                if needs_weight:
                    grad_weight.add(spread, (factor * inputs[rows]).to(dtype))
                if needs_bias:
                    grad_bias += spread.T.to(wide) @ factor.squeeze(-1)
        return (
            grad_hidden.to(hidden.dtype) if needs_hidden else None,
            grad_weight.total(),
            grad_bias.to(weight.dtype) if needs_bias else None,
            *[None] * 8,
        )


class _Sum:
    """The sum of what `accumulate` does not take, over chunks in float32 or better.

    In bf16, of which a sharded head has its weights, every further chunk would add a rounding.
    """

    def __init__(self, weight: Tensor, accumulate: Accumulate | None) -> None:
        self.weight, self.accumulate = weight, accumulate
        self.sum: Tensor | None = None

    def add(self, spread: Tensor, inputs: Tensor) -> None:
        if self.accumulate is None:
            rest: Tensor | None = spread.T @ inputs
        else:
            rest = self.accumulate(self.weight, spread, inputs)
        if rest is None:
            return
        # One chunk is not widened: that would be a table more.
        self.sum = rest if self.sum is None else at_least_float32(self.sum).add_(rest)

    def total(self) -> Tensor | None:
        """Return the sum in the dtype of the weight; None of nothing."""
        return None if self.sum is None else self.sum.to(self.weight.dtype)


class _Head(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None
    compiled: bool

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *settings: Any) -> _Head:
        return cls(weight.to(dtype), None if bias is None else bias.to(dtype), *settings)

    def logits(self, inputs: Tensor) -> Tensor:
        return torch.nn.functional.linear(inputs, self.weight, self.bias)

    def statistics(
        self, logits: Tensor, tokens: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return `[C]` log-probabilities of `tokens`, and entropies."""
        found = self._run(chunk_statistics, logits, tokens, after=(with_entropy,))
        if found is not None:
            return found  # type: ignore[no-any-return]
        logprobs, entropies = [], []
        for rows in self._in_cache(logits):
            all_logprobs = self._log_softmax(logits[rows])
            logprobs.append(all_logprobs.gather(1, tokens[rows, None]).squeeze(1))
            if with_entropy:
                entropies.append(_entropy(all_logprobs))
        return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None

    def errors(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return `p - onehot` `[C, V]` in the dtype of `logits`."""
        found = self._run(chunk_errors, logits, tokens)
        if found is not None:
            return found  # type: ignore[no-any-return]
        spread = torch.empty_like(logits)
        for rows in self._in_cache(logits):
            error = self._log_softmax(logits[rows]).exp_()
            own = tokens[rows, None]
            error.scatter_add_(1, own, error.new_full((1, 1), -1.0).expand_as(own))
            spread[rows] = self._uncapped(error, logits[rows])
        return spread

    def spread(
        self, logits: Tensor, tokens: Tensor, factor: Tensor, d_entropy: Tensor, entropy: Tensor
    ) -> Tensor:
        """Return `factor (p - onehot) + d_entropy p (log p + entropy)`, as `errors` does."""
        found = self._run(chunk_spread, logits, tokens, factor, d_entropy, entropy)
        if found is not None:
            return found  # type: ignore[no-any-return]
        spread = torch.empty_like(logits)
        for rows in self._in_cache(logits):
            logprobs = self._log_softmax(logits[rows])
            outer = (logprobs + entropy[rows, None]).mul_(d_entropy[rows]).add_(factor[rows])
            mixed = logprobs.exp_().mul_(outer)
            mixed.scatter_add_(1, tokens[rows, None], -factor[rows])
            spread[rows] = self._uncapped(mixed, logits[rows])
        return spread

    def _run(self, function: Any, *tensors: Tensor, after: tuple[Any, ...] = ()) -> Any:
        if not self.compiled:
            return None
        settings = (self.temperature, self.softcap, *after)
        return run_compiled(function, *tensors, *settings)

    def _uncapped(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Return the gradient of the head's output, from that of the capped logits."""
        if self.softcap is None:
            return grad
        tanh = torch.tanh(at_least_float32(logits) / self.softcap)
        return grad.mul_(1 - tanh.square_())

    def _log_softmax(self, logits: Tensor) -> Tensor:
        widened = at_least_float32(logits)
        if self.softcap is not None:
            widened = self.softcap * torch.tanh(widened / self.softcap)
        return torch.log_softmax(
            widened if self.temperature == 1 else widened / self.temperature, -1
        )

    def _in_cache(self, logits: Tensor) -> list[slice]:
        if not _on_cpu(logits.device):
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
