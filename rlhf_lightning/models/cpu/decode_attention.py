"""Attention of one new token on a CPU.

torch's CPU kernel is made for many queries. For one it takes up to four times as long in bf16 as in
float32, and ten times as long when key-value heads are shared and there is no mask. So the cache
holds float32 on a CPU, and the queries that share a head are passed as if they were positions.

Legend: A rows, H query heads, G key-value heads, T columns, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf_lightning.models.cpu.attention import takes_attention_by_name

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
    configs = _attention_configs(model)
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


def _attention_configs(model: PreTrainedModel) -> list[PretrainedConfig]:
    found = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    return list(found.values())


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
