"""Llama's decoder layer on a CPU, forward and backward written out.

Legend: B rows, W positions, N = B * W tokens, H hidden size, G key-value heads, Q query heads of
each, D head size.

Layer by layer, the plain modules spend as long on casts, on small elementwise operations and on the
graph between them as on their matrix products. Here a layer is two autograd functions. Each keeps
what its products need, in the compute dtype, and makes the normed states, the rotary embeddings and
the gated product again in the backward pass. The arithmetic is the plain layer's: products in the
dtype of autocast; residuals, norms, rotations and softmax in fp32.

A layer that is anything else than Llama's plain one (adapters, biases, dropout, a cache, a mask,
another device, long rows) runs as transformers wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rlhf_lightning.models.cpu.attention import LONGEST, NAME, causal_softmax, compute_dtype
from rlhf_lightning.models.cpu.row_blocks import RowBlocks
from rlhf_lightning.models.cpu.weight_grads import accumulate_weight_grad, product


def use_fused_layers(model: PreTrainedModel) -> None:
    """Let Llama's decoder layers in `model` run by the functions of this file where they can."""
    for layer in model.modules():
        if type(layer) is LlamaDecoderLayer:
            layer.__class__ = FusedLlamaDecoderLayer


class FusedLlamaDecoderLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """Llama's decoder layer; see the top of the file."""

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:  # type: ignore[override]
        """Return `[B, W, H]`; the arguments are those of the layer in transformers."""
        if not self._can_fuse(hidden_states, options):
            plain: Tensor = super().forward(hidden_states, **options)
            return plain
        dtype = compute_dtype(hidden_states)
        attention, mlp = self.self_attn, self.mlp
        cos, sin = options["position_embeddings"]
        rows = None
        if "row_lengths" in options:
            rows = RowBlocks.of(options["row_lengths"])
            cos, sin = cos[:, rows.positions], sin[:, rows.positions]
        turns = Turns.of(cos, sin, attention.scaling)
        with torch.autocast("cpu", enabled=False):
            hidden_states = _Attention.apply(
                hidden_states,
                self.input_layernorm.weight,
                attention.q_proj.weight,
                attention.k_proj.weight,
                attention.v_proj.weight,
                attention.o_proj.weight,
                turns,
                self.input_layernorm.variance_epsilon,
                dtype,
                rows,
            )
            result: Tensor = _GatedMLP.apply(
                hidden_states,
                self.post_attention_layernorm.weight,
                mlp.gate_proj.weight,
                mlp.up_proj.weight,
                mlp.down_proj.weight,
                self.post_attention_layernorm.variance_epsilon,
                dtype,
                rows,
            )
        return result

    def _can_fuse(self, hidden_states: Tensor, options: dict[str, Any]) -> bool:
        attention, mlp = self.self_attn, self.mlp
        linears = (
            *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
            *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
        )
        return (
            hidden_states.device.type == "cpu"
            and hidden_states.dtype == torch.float32
            and compute_dtype(hidden_states) in (torch.float32, torch.bfloat16)
            and 1 < max(options.get("row_lengths", (hidden_states.shape[1],))) <= LONGEST
            and ("row_lengths" in options or options.get("attention_mask") is None)
            and options.get("cache", options.get("past_key_values")) is None  # 5.24's name, older
            and options.get("position_embeddings") is not None
            and attention.config._attn_implementation == NAME
            and attention.config.hidden_act == "silu"
            and not (self.training and attention.attention_dropout)
            and all(type(linear) is nn.Linear and linear.bias is None for linear in linears)
        )


class Turns(NamedTuple):
    """Rotary embeddings: cosine and sine `[1 or B, W, 1, D / 2]` in fp32, and attention's scale."""

    cos: Tensor
    sin: Tensor
    scale: float

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor, scale: float) -> Turns:
        """Take the first half of transformers' `[.., W, D]`; the second repeats it."""
        half = cos.shape[-1] // 2
        return cls(cos[:, :, None, :half].float(), sin[:, :, None, :half].float(), scale)

    def first(self, positions: int) -> Turns:
        """Return those of the first positions."""
        return Turns(self.cos[:, :positions], self.sin[:, :positions], self.scale)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Return `[N, heads * D]` turned, times `scale`, as `[B, heads, W, D]`."""
        batch = x.numel() // (x.shape[-1] * self.cos.shape[1])
        half = self.cos.shape[-1]
        parts = x.float().view(batch, self.cos.shape[1], -1, 2, half)
        out = x.new_empty(batch, parts.shape[2], parts.shape[1], 2, half)
        self._turn(parts, out.transpose(1, 2), self.cos * scale, self.sin * scale)
        return out.flatten(3)

    def backward(self, grad: Tensor, scale: float = 1.0) -> Tensor:
        """Return the gradient `[B, heads, W, D]` turned back, as `[N, heads * D]`."""
        batch, heads, positions, size = grad.shape
        parts = grad.float().view(batch, heads, positions, 2, size // 2).transpose(1, 2)
        out = grad.new_empty(batch, positions, heads, 2, size // 2)
        self._turn(parts, out, self.cos * scale, self.sin * -scale)
        return out.view(batch * positions, heads * size)

    @staticmethod
    def _turn(parts: Tensor, out: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Write `[a cos - b sin, b cos + a sin]` of `[B, W, heads, 2, D / 2]` into `out`."""
        a, b = parts.unbind(3)
        out.select(3, 0).copy_((a * cos).addcmul_(b, sin, value=-1))
        out.select(3, 1).copy_((b * cos).addcmul_(a, sin))


class Norm(NamedTuple):
    """Root-mean-square norm of states `x` `[N, H]`, with what its gradient needs."""

    x: Tensor
    weight: Tensor
    inverse: Tensor  # [N, 1], 1 / root mean square

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, epsilon: float) -> Norm:
        """Measure `x`."""
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        return cls(x, weight, square.div_(x.shape[-1]).add_(epsilon).rsqrt_())

    def normed(self, dtype: torch.dtype) -> Tensor:
        """Return the normed states `[N, H]`."""
        return (self.x * self.inverse).mul_(self.weight).to(dtype)

    def backward(self, grad: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of `x`, with `outer` added, and of the weight; overwrites `grad`."""
        unit = self.x * self.inverse
        product = grad * unit
        grad_weight = product.sum(0)
        inner = (product @ self.weight).div_(-self.x.shape[-1]).unsqueeze(-1)  # [N, 1]
        grad.mul_(self.weight).addcmul_(unit, inner).mul_(self.inverse)
        return grad.add_(outer), grad_weight


def _through(grad: Tensor, weight: Tensor, into: Tensor | None = None) -> Tensor:
    """Return the gradient `grad @ weight` in fp32, added to `into`."""
    by_input = product(grad, weight.to(grad.dtype))
    return by_input.float() if into is None else into.add_(by_input)


def _forward_product(x: Tensor, weight: Tensor, rows: RowBlocks | None) -> Tensor:
    """Return `x @ weight.T`; a row by itself has the same bits whatever is beside it."""
    return x @ weight.T if rows is None else product(x, weight.T)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        v_weight: Tensor,
        o_weight: Tensor,
        turns: Turns,
        epsilon: float,
        dtype: torch.dtype,
        rows: RowBlocks | None,
    ) -> Tensor:
        """Return `x` `[B, W, H]` plus the attention of its normed states."""
        size = 2 * turns.cos.shape[-1]
        states = x.view(-1, x.shape[-1])
        norm = Norm.of(states, norm_weight, epsilon)
        normed = norm.normed(dtype)
        parts = (normed, q_weight), (normed, k_weight), (normed, v_weight)
        query, key, value = (_forward_product(a, w.to(dtype), rows) for a, w in parts)
        if rows is None:
            attended, *kept = _attend(query, key, value, turns, x.shape[:2], size)
        else:
            query, key, value = rows.spread(query), rows.spread(key), rows.spread(value)
            slots, kept = torch.empty_like(query), []
            for block, *shape in rows:
                own = query[block], key[block], value[block]
                slots[block], *saved = _attend(*own, turns.first(shape[1]), shape, size)
                kept += saved
            attended = rows.gather(slots)  # [N, G * Q * D]
        ctx.save_for_backward(
            *(norm.x, norm.weight, norm.inverse, q_weight, k_weight, v_weight, o_weight),
            *(attended, *kept),
        )
        ctx.turns, ctx.rows = turns, rows
        return (states + _forward_product(attended, o_weight.to(dtype), rows)).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `x` and the weights."""
        saved, turns, rows = ctx.saved_tensors, ctx.turns, ctx.rows
        *norm, q_weight, k_weight, v_weight, o_weight, attended = saved[:8]
        kept, norm = saved[8:], Norm(*norm)
        dtype, shape = attended.dtype, grads[0].shape
        outer = grads[0].reshape(-1, shape[-1])
        with torch.autocast("cpu", enabled=False):
            grad = outer.to(dtype)
            o_grad = accumulate_weight_grad(o_weight, grad, attended)
            grad = product(grad, o_weight.to(dtype))  # [N, G * Q * D]
            if rows is None:
                by_query, by_key, by_value = _attend_backward(grad, turns, *kept)
            else:
                slots = rows.spread(grad)
                parts = [
                    _attend_backward(slots[block], turns.first(width), *kept[4 * i : 4 * i + 4])
                    for i, (block, _, width) in enumerate(rows)
                ]
                by_query, by_key, by_value = (
                    rows.gather(torch.cat(column)) for column in zip(*parts, strict=True)
                )
            normed = norm.normed(dtype)
            into = _through(by_query, q_weight)
            _through(by_value, v_weight, _through(by_key, k_weight, into))
            x_grad, norm_grad = norm.backward(into, outer)
            return (
                x_grad.view(shape),
                norm_grad,
                accumulate_weight_grad(q_weight, by_query, normed),
                accumulate_weight_grad(k_weight, by_key, normed),
                accumulate_weight_grad(v_weight, by_value, normed),
                o_grad,
                *(None, None, None, None),
            )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, turns: Turns, shape: Sequence[int], size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return `[b * W, G * Q * D]` of rows of one width, and what the backward pass needs.

    Args:
        query: `[b * W, G * Q * D]`, before its rotation.
        key: `[b * W, G * D]`, before its rotation.
        value: `[b * W, G * D]`.
        turns: the rotations of the positions.
        shape: the sizes b and W.
        size: D, the size of a head.
    """
    rows, positions = shape
    query, key = turns.forward(query, turns.scale), turns.forward(key)
    value = value.view(rows, positions, -1, size).transpose(1, 2)  # [b, G, W, D]
    query = query.view(rows, key.shape[1], -1, size)  # [b, G, Q * W, D]
    weights = causal_softmax(query @ key.transpose(-1, -2))
    attended = (weights.to(value.dtype) @ value).view(rows, -1, positions, size)
    # As large as the states at most; longer rows make them again.
    kept = weights if positions <= size else None
    return attended.transpose(1, 2).reshape(rows * positions, -1), query, key, value, kept


def _attend_backward(
    grad: Tensor, turns: Turns, query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `_attend`'s query, key and value by that of its result."""
    rows, _, positions, size = key.shape
    dtype = query.dtype
    shares = kept if kept is not None else causal_softmax(query @ key.transpose(-1, -2))
    grad = grad.view(rows, positions, -1, size)
    grad = grad.transpose(1, 2).reshape(query.shape)  # [b, G, Q * W, D]
    v_grad = shares.to(dtype).transpose(-1, -2) @ grad
    grad_logits = (grad @ value.transpose(-1, -2)).float()
    inner = (grad_logits * shares).sum(-1, keepdim=True)
    grad_logits = grad_logits.sub_(inner).mul_(shares).to(dtype)
    by_query = (grad_logits @ key).view(rows, -1, positions, size)
    by_query = turns.backward(by_query, turns.scale)
    by_key = turns.backward(grad_logits.transpose(-1, -2) @ query)
    return by_query, by_key, v_grad.transpose(1, 2).reshape(rows * positions, -1)


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        epsilon: float,
        dtype: torch.dtype,
        rows: RowBlocks | None,
    ) -> Tensor:
        """Return `x` `[B, W, H]` plus `down(silu(gate) * up)` of its normed states."""
        states = x.view(-1, x.shape[-1])
        norm = Norm.of(states, norm_weight, epsilon)
        normed = norm.normed(dtype)
        gate = _forward_product(normed, gate_weight.to(dtype), rows)
        up = _forward_product(normed, up_weight.to(dtype), rows)
        ctx.save_for_backward(*norm, gate_weight, up_weight, down_weight, gate, up)
        opened = silu(gate).mul_(up)
        return (states + _forward_product(opened, down_weight.to(dtype), rows)).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `x` and the weights."""
        *norm, gate_weight, up_weight, down_weight, gate, up = ctx.saved_tensors
        norm, shape = Norm(*norm), grads[0].shape
        outer = grads[0].reshape(-1, shape[-1])
        with torch.autocast("cpu", enabled=False):
            grad = outer.to(gate.dtype)
            opened = silu(gate)
            down_grad = accumulate_weight_grad(down_weight, grad, opened * up)
            grad = product(grad, down_weight.to(gate.dtype))
            by_up = opened.mul_(grad)
            by_gate = torch.ops.aten.silu_backward(grad.mul_(up), gate)
            normed = norm.normed(gate.dtype)
            into = _through(by_up, up_weight, _through(by_gate, gate_weight))
            x_grad, norm_grad = norm.backward(into, outer)
            return (
                x_grad.view(shape),
                norm_grad,
                accumulate_weight_grad(gate_weight, by_gate, normed),
                accumulate_weight_grad(up_weight, by_up, normed),
                down_grad,
                *(None, None, None),
            )
