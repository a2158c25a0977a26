"""Attention on a CPU: causal, of short rows in bf16, and of one new token while decoding.

Legend: B rows, G key-value heads, Q query heads of each, W positions, D head size; A rows that are
decoded, H query heads.

Our rows are padded at the right and carry no mask. For them torch runs its flash kernel, whose
bf16 backward takes 3 to 5 times as long as the plain formula up to some hundred positions. Here the
formula is written out, softmax in fp32, and the weights `[B, G, Q * W, W]` are made again in the
backward pass, so that memory stays what it was. Everything else goes to torch's kernel as before.

torch's CPU kernel is made for many queries. For one it takes up to four times as long in bf16 as in
float32, and ten times as long when key-value heads are shared and there is no mask. So the cache
holds float32 on a CPU, and the queries that share a head are passed as if they were positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "rlhf_lightning_sdpa"
LONGEST = 512  # beyond, the flash kernel is as fast


def use_short_attention(model: PreTrainedModel) -> None:
    """Let `model` use the attention of this file wherever it would use torch's sdpa."""
    config = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) == "sdpa" and takes_attention_by_name(model):
        model.set_attn_implementation(NAME)


def takes_attention_by_name(model: PreTrainedModel) -> bool:
    """Return whether all of `model` looks its attention up in transformers' table.

    Falcon asks whether the name is "sdpa", and takes any other one for its own formula, to which
    a boolean mask is added as ones and zeros.
    """
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return all(part._can_set_attn_implementation() for part in parts)


def short_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return `[B, W, G * Q, D]`; the signature is that of transformers' attention functions.

    With `row_lengths` in `options`, B is 1, the positions are rows one after the other, each of
    which attends within itself, and there is nothing in the mask.
    """
    row_lengths: tuple[int, ...] | None = options.pop("row_lengths", None)
    options |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
    if row_lengths is not None:
        rows = zip(*(x.split(row_lengths, dim=2) for x in (query, key, value)), strict=True)
        each = [short_attention(module, q, k, v, None, **options)[0] for q, k, v in rows]
        return torch.cat(each, dim=1), None
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    positions = query.shape[2]
    if not (
        query.device.type == "cpu"
        and compute_dtype(query) == torch.bfloat16
        and attention_mask is None
        and causal
        and not dropout
        and 1 < positions <= LONGEST
        and key.shape[2] == positions
        and query.shape[1] % key.shape[1] == 0
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x.to(torch.bfloat16) for x in (query, key, value))
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])  # [B, G, Q * W, D]
    attended = _ShortAttention.apply(grouped, key, value, scale)
    return attended.reshape(query.shape).transpose(1, 2).contiguous(), None


def compute_dtype(states: Tensor) -> torch.dtype:
    """Return the dtype that torch's sdpa would compute in: rotary embeddings leave fp32 behind."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else states.dtype


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        with torch.autocast("cpu", enabled=False):
            return _weights(query, key, scale).to(value.dtype) @ value

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            grad = grad_outputs[0].to(value.dtype)
            weights = _weights(query, key, ctx.scale)  # [B, G, Q * W, W] fp32
            grad_value = weights.to(value.dtype).transpose(-1, -2) @ grad
            outer = (grad @ value.transpose(-1, -2)).float()
            inner = (outer * weights).sum(-1, keepdim=True)
            grad_logits = outer.sub_(inner).mul_(weights).mul_(ctx.scale).to(query.dtype)
            return grad_logits @ key, grad_logits.transpose(-1, -2) @ query, grad_value, None


def _weights(query: Tensor, key: Tensor, scale: float) -> Tensor:
    return causal_softmax(query @ key.transpose(-1, -2), scale)


def causal_softmax(logits: Tensor, scale: float = 1.0) -> Tensor:
    """Return the causal attention weights of scaled `logits` `[B, G, Q * W, W]`, in fp32."""
    rows, positions = logits.shape[-2:]
    later = torch.ones(positions, positions, dtype=torch.bool).triu_(1)
    later = later.repeat(rows // positions, 1)  # [Q * W, W]
    logits = logits.float() if scale == 1 else logits.float().mul_(scale)
    return logits.masked_fill_(later, float("-inf")).softmax(-1)


AttentionInterface.register(NAME, short_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


SUFFIX = "_one_token"
# Arguments that do not change what one query attends to: the mask has it all.
HARMLESS = {"is_causal", "sliding_window", "position_ids", "use_cache", "output_attentions"}
Attention = Callable[..., tuple[Tensor, Tensor | None]]


@contextmanager
def one_token_attention(model: PreTrainedModel) -> Iterator[bool]:
    """Let single tokens of `model` attend by this file's function; yield whether they do.

    Only on a CPU, only in the place of torch's scaled dot product attention, and only in models
    that take what stands under a name.
    """
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    configs = {id(part.config): part.config for part in parts}.values()
    names = {config._attn_implementation for config in configs}
    known = names and all(map(_takes_boolean_masks, names)) and takes_attention_by_name(model)
    if model.device.type != "cpu" or not known:
        yield False
        return
    before = [(config, config._attn_implementation) for config in configs]
    try:
        for config, name in before:
            config._attn_implementation = _registered(name)
        yield True
    finally:
        for config, name in before:
            config._attn_implementation = name


def _takes_boolean_masks(name: str | None) -> bool:
    known = name in ALL_MASK_ATTENTION_FUNCTIONS and name in ALL_ATTENTION_FUNCTIONS
    return known and ALL_MASK_ATTENTION_FUNCTIONS[name] is sdpa_mask


def _registered(name: str) -> str:
    """Register the function that falls back to the attention called `name`; return its name."""
    mine = name + SUFFIX
    if mine not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(mine, partial(_attend, ALL_ATTENTION_FUNCTIONS[name]))
        AttentionMaskInterface.register(mine, sdpa_mask)
    return mine


def _attend(
    otherwise: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return `[A, 1, H, D]`; the signature is that of transformers' attention functions."""
    rows, heads, queries, width = query.shape
    if (
        queries > 1
        or dropout
        or {key.dtype, value.dtype} != {torch.float32}
        or (attention_mask is not None and attention_mask.shape[1] != 1)
        or any(value is not None for name, value in options.items() if name not in HARMLESS)
    ):
        options |= {"dropout": dropout, "scaling": scaling}
        return otherwise(module, query, key, value, attention_mask, **options)
    grouped = query.float().reshape(rows, key.shape[1], -1, width)  # [A, G, H / G, D]
    autocast = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    try:
        attended = functional.scaled_dot_product_attention(
            grouped, key, value, attn_mask=attention_mask, scale=scaling
        )
    finally:
        torch.set_autocast_enabled("cpu", autocast)
    return attended.reshape(rows, 1, heads, value.shape[-1]).to(query.dtype), None
