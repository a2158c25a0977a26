"""One token through models of Llama's kind, in few kernels.

As transformers writes it, a layer takes 45 kernels for one token, most of them small: casts, the
parts of a norm, halves of a rotation. Here it takes 20. The products are in the dtype of the
weights' copies; residuals and norms are in that of the embedding, as under autocast.

Legend: S slots, T columns, H hidden size, G key-value heads, Q query heads of each, D head size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from rlhf_lightning.models.gpu_kernels import fuses, is_fused
from rlhf_lightning.rollout.generators.prepared_weights import PreparedWeights

_KINDS = ((llama, "Llama"), (mistral, "Mistral"), (qwen2, "Qwen2"), (qwen3, "Qwen3"))
_ATTENTION, _NORMS, _MLPS, _MODELS = (
    [getattr(module, kind + part) for module, kind in _KINDS]
    for part in ("Attention", "RMSNorm", "MLP", "ForCausalLM")
)


class LlamaDecoder:
    """The forward of one new token a row.

    Args:
        model: one that `of` takes.
        weights: copies of its weights, with those of q, k and v, and of gate and up, together.
    """

    def __init__(self, model: Any, weights: PreparedWeights) -> None:
        self.trunk, self.head = model.model, model.lm_head
        self.layers = [_Layer(layer, weights) for layer in self.trunk.layers]

    @classmethod
    def of(cls, model: PreTrainedModel, weights: PreparedWeights) -> LlamaDecoder | None:
        """Return the decoder of `model`, or None where a part of it is not Llama's plain one.

        Nor is there one with `model.kernels=torch`.
        """
        is_llama = type(model) in _MODELS and type(model.lm_head) is nn.Linear
        if not fuses() or not is_llama:
            return None
        is_plain = all(_is_plain(layer, weights) for layer in model.model.layers)
        return cls(model, weights) if is_plain else None

    def __call__(
        self, tokens: Tensor, positions: Tensor, bias: Tensor, cache: Sequence[Any], column: Tensor
    ) -> Tensor:
        """Return the logits `[S, V]` of what follows `tokens`.

        Args:
            tokens: `[S]` ids.
            positions: `[S, 1]` their positions.
            bias: `[S, 1, 1, T]`, added to the products of queries and keys.
            cache: `keys` and `values` `[S, G, T, D]` of each layer; those of `tokens` are written.
            column: `[1]` where they are written.
        """
        states = self.trunk.embed_tokens(tokens)  # [S, H]
        cos, sin = self.trunk.rotary_emb(states, positions)  # [S, 1, D]
        half = cos.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        with torch.autocast(tokens.device.type, enabled=False):
            for layer, window in zip(self.layers, cache, strict=True):
                states = layer.attend(states, cos, sin, bias, window, column)
                states = layer.gate(states)
        return self.head(self.trunk.norm(states))  # type: ignore[no-any-return]


class _Layer:
    def __init__(self, layer: Any, weights: PreparedWeights) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention, self.down, self.out = attention, mlp.down_proj, attention.o_proj
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv = weights.stacks[parts]
        self.gate_up = weights.stacks[mlp.gate_proj, mlp.up_proj]
        self.size = attention.head_dim
        self.heads = [part.out_features // self.size for part in parts]

    def attend(
        self, states: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, window: Any, column: Tensor
    ) -> Tensor:
        """Return `[S, H]` states plus the attention of their norm; see `LlamaDecoder`."""
        slots, (queries, groups, _), size = len(states), self.heads, self.size
        dtype = self.qkv[0].dtype
        qkv = functional.linear(_normed(states, self.before).to(dtype), *self.qkv)
        qkv = qkv.view(slots, -1, size)  # [S, G * Q + 2 G, D]
        turned, value = qkv[:, : queries + groups], qkv[:, queries + groups :]
        if hasattr(self.attention, "q_norm"):
            parts = torch.split(turned, [queries, groups], 1)
            norms = (self.attention.q_norm, self.attention.k_norm)
            turned = torch.cat([_normed(x, norm) for x, norm in zip(parts, norms, strict=True)], 1)
        # The halves of a rotation change places, and `sin` has the sign of the first.
        rounded = qkv.new_empty(turned.shape)
        turned = torch.addcmul(turned * cos, turned.roll(size // 2, -1), sin, out=rounded)
        window.keys.index_copy_(2, column, turned[:, queries:].unsqueeze(2))
        window.values.index_copy_(2, column, value.unsqueeze(2))
        # Queries that share a head are passed as if they were positions.
        attended = functional.scaled_dot_product_attention(
            turned[:, :queries].reshape(slots, groups, -1, size),
            window.keys,
            window.values,
            attn_mask=bias,
            scale=self.attention.scaling,
        )
        return states + self.out(attended.reshape(slots, -1))  # type: ignore[no-any-return]

    def gate(self, states: Tensor) -> Tensor:
        """Return `[S, H]` states plus the gated product of their norm."""
        normed = _normed(states, self.between).to(self.gate_up[0].dtype)
        gate, up = functional.linear(normed, *self.gate_up).chunk(2, -1)
        return states + self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]


def _normed(x: Tensor, norm: Any) -> Tensor:
    """Return the norm of `x` over its last dimension, in the dtype that transformers gives it."""
    weight: Tensor = norm.weight
    if x.dtype == weight.dtype:
        return functional.rms_norm(x, weight.shape, weight, norm.variance_epsilon)
    return functional.rms_norm(x, weight.shape, None, norm.variance_epsilon) * weight


def _is_plain(layer: Any, weights: PreparedWeights) -> bool:
    """Return whether this file computes what `layer` does, and its weights are copied together."""
    attention, mlp = layer.self_attn, layer.mlp
    if type(attention) not in _ATTENTION or type(mlp) not in _MLPS:
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    parts = (layer, attention, mlp, *norms)
    return (
        all(type(norm) in _NORMS for norm in norms)
        and (attention.q_proj, attention.k_proj, attention.v_proj) in weights.stacks
        and (mlp.gate_proj, mlp.up_proj) in weights.stacks
        and attention.config.hidden_act == "silu"
        and all("forward" not in vars(part) or is_fused(part) for part in parts)
    )
