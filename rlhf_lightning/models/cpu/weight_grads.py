"""Gradients of weights that go straight into `.grad`, and embeddings that use it.

Autograd hands each micro-batch's gradient over as a tensor as large as the weights, in their dtype,
and then adds it. For matrices on a CPU that is a cast and a pass over memory more than the addition
needs; for an embedding it is a table of zeros with a few rows filled in, once a micro-batch.

oneDNN takes longer for products of bf16 than MKL for those of fp32 on processors that have no
instruction for them. There the factors are widened, which is exact; the sum is one of fp32 either
way, and is rounded to bf16 once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel


@cache
def multiplies_bf16() -> bool:
    """Return whether the processor multiplies bf16 matrices faster than fp32 ones."""
    found = torch.cpu.get_capabilities()
    if found.get("architecture") != "x86_64":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which matrices of `dtype` are multiplied fastest, without less precision.

    The bits of a row of an fp32 product may depend on the number of rows beside it, those of a
    bf16 product do not. So this is for backward passes, and for forwards of packed rows.
    """
    return torch.float32 if dtype == torch.bfloat16 and not multiplies_bf16() else dtype


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` in the dtype of `a`, on a CPU multiplied in `product_dtype` of it."""
    dtype = product_dtype(a.dtype) if a.device.type == "cpu" else a.dtype
    return (a.to(dtype) @ b.to(dtype)).to(a.dtype)


# Of a gradient, counted in fp32: what is widened at a time, and what is multiplied at a time.
PART_BYTES = 4 * 2**20
BLOCK_BYTES = 32 * 2**20


def adds_in_place(weight: Tensor) -> bool:
    """Return whether only the optimizer reads the gradient of `weight`.

    Sharded weights and weights with hooks are left to autograd.
    """
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and not weight._backward_hooks
        and not getattr(weight, "_post_accumulate_grad_hooks", None)
    )


def accumulate_weight_grad(weight: Tensor, grad: Tensor, inputs: Tensor) -> Tensor | None:
    """Add the gradient `grad.T @ inputs` of a matrix to `weight.grad`, if it is trained.

    No second tensor as large as the matrix is made: fp32 is multiplied into `.grad`, any other
    dtype in blocks that are widened while they are in the cache.

    Args:
        weight: `[M, K]` parameter.
        grad: `[N, M]` of the products of `inputs` and `weight`.
        inputs: `[N, K]` inputs of the layer.

    Returns:
        The gradient where autograd is to add it, else None.
    """
    if not weight.requires_grad:
        return None
    if not adds_in_place(weight):
        return product(grad.T, inputs).to(weight.dtype)
    dtype = product_dtype(grad.dtype)
    grad, inputs = grad.to(dtype), inputs.to(dtype)
    first = weight.grad is None
    if weight.grad is None:
        weight.grad = torch.empty_like(weight)
    if grad.dtype == weight.dtype:
        weight.grad.addmm_(grad.T, inputs, beta=0 if first else 1)
        return None
    count = -(-weight.numel() * 4 // BLOCK_BYTES)
    blocks = zip(weight.grad.chunk(count), grad.chunk(count, dim=1), strict=True)
    for into, columns in blocks:
        _add_in_parts(into, columns.T @ inputs, replace=first)
    return None


def _add_in_parts(total: Tensor, gradient: Tensor, *, replace: bool) -> None:
    rows = max(PART_BYTES // (4 * gradient[0].numel()), 1)
    for into, part in zip(total.split(rows), gradient.split(rows), strict=True):
        if replace:
            into.copy_(part)
        else:
            into.add_(part)


class RowsEmbedding(nn.Embedding):
    """An embedding whose gradient touches the rows that were looked up and no others."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of `input`."""
        plain = not (self.max_norm or self.scale_grad_by_freq or self.sparse)
        if not plain or not (self.weight.requires_grad and adds_in_place(self.weight)):
            return super().forward(input)
        rows: Tensor = _Rows.apply(input, self.weight, self.padding_idx)
        return rows


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.index, ctx.weight, ctx.padding_idx = index, weight, padding_idx
        return embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        weight: Tensor = ctx.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        index, rows = ctx.index.flatten(), grads[0].reshape(-1, weight.shape[1])
        if ctx.padding_idx is not None:
            rows = rows * (index != ctx.padding_idx).unsqueeze(-1)
        weight.grad.index_add_(0, index, rows.to(weight.dtype))
        return None, None, None


def use_rows_embedding(model: PreTrainedModel) -> None:
    """Let the input embedding of `model` be a `RowsEmbedding`, if it is a plain one."""
    module = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    if type(module) is nn.Embedding:
        module.__class__ = RowsEmbedding
