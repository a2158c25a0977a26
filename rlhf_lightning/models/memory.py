"""Memory of an update on a GPU, in bytes, by a formula; and how many tokens a micro-batch may have.

Two numbers: what an update holds whatever its micro-batches are, and what a token of one adds. Both
follow from the config and from what is trained. On an H100 (Qwen2-0.5B, rows of 768 tokens, torch
2.11) the peak grew by 1,606,520 bytes a token under autocast, by 1,387,044 with bf16 weights, and
by 1,197,426 under autocast with fused norms and MLPs; `tests/models/test_memory.py` has the
formula beside these numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_lightning.functional.linear_logprobs import ON_GPU
from rlhf_lightning.models.gpu_kernels import fused_parts
from rlhf_lightning.models.micro_batching import TOKENS

# fp32: no autocast. mixed: autocast over fp32 weights. bf16: weights and activations (FSDP2).
Arithmetic = Literal["fp32", "mixed", "bf16"]
# Of free memory: the rest is lost between blocks of the allocator, or needed by libraries.
USABLE = 0.9
GRADIENT, ADAM, COPY = 4, 8, 2  # bytes of a trained fp32 weight
# Tables `[C, V]` in fp32 that the head holds at once: logits, log-probabilities, their gradient.
HEAD_TABLES = 3


def activation_bytes(
    config: PretrainedConfig,
    arithmetic: Arithmetic,
    *,
    fused: Collection[str] = (),
    checkpointing: bool = False,
) -> int:
    """Return the bytes that one token of a micro-batch holds until its backward pass.

    Args:
        config: config of the decoder.
        arithmetic: dtypes of its forward.
        fused: which of "norms" and "MLPs" are one kernel each, which keeps its inputs alone.
        checkpointing: a layer keeps its input, and one layer at a time all the rest.
    """
    config = config.get_text_config()
    width, wide = config.hidden_size, 4 if arithmetic == "fp32" else 2
    heads = getattr(config, "num_attention_heads", None) or 1
    head_size = getattr(config, "head_dim", None) or width // heads
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head_size
    # Two norms: their fp32 input, and unless fused what is multiplied by the weight; then what five
    # matrices read. Autocast casts it for each of them, fused norms once.
    norms = 2 * 4 * width
    norms += 0 if "norms" in fused else 2 * width * (2 if arithmetic == "bf16" else 4)
    casts = 2 if "norms" in fused else 5
    inputs = {"fp32": 2 * 4, "mixed": casts * 2, "bf16": 2 * 2}[arithmetic] * width
    attention = wide * (2 * heads * head_size + 2 * keys)  # queries and output, keys and values
    gated = wide * (3 if "MLPs" in fused else 4) * _inner_size(config)
    layer = norms + inputs + attention + gated
    end = 10 * width  # the last norm, and the states that the head reads
    layers = int(config.num_hidden_layers)
    if checkpointing:
        kept = width * (2 if arithmetic == "bf16" else 4)
        return layers * kept + 2 * layer + end
    return layers * layer + end


def update_bytes(
    roots: Sequence[nn.Module], arithmetic: Arithmetic, *, sharded: bool = False
) -> int:
    """Return the bytes that an update adds to placed weights, without its activations.

    Gradients and Adam's state of what is trained, bf16 copies of its matrices or what FSDP2
    gathers, and the head's tables; not what captured decoding keeps (`captured.bytes_kept`).

    Args:
        roots: placed models.
        arithmetic: dtypes of their forwards.
        sharded: they are sharded by FSDP2.
    """
    total = 0
    for root in roots:
        trained = [p for p in root.parameters() if p.requires_grad]
        total += (GRADIENT + ADAM) * sum(_own_size(p) for p in trained)
        if not trained:
            continue
        if sharded:
            total += (COPY + GRADIENT) * _gathered(root)
        elif arithmetic == "mixed":
            total += COPY * sum(p.numel() for p in trained if p.ndim > 1)
        for model in _decoders(root):
            head = model.get_output_embeddings()
            if head is not None:  # chunks, the weight in bf16, its gradient in bf16 and in fp32
                total += HEAD_TABLES * ON_GPU.chunk + 6 * int(head.weight.numel())
    return total


def tokens_that_fit(
    roots: Sequence[nn.Module],
    free: int,
    arithmetic: Arithmetic,
    *,
    sharded: bool = False,
) -> int:
    """Return how many tokens a micro-batch of an update may have: `TOKENS`, or fewer.

    Args:
        roots: placed models, before there are gradients and an optimizer's state.
        free: bytes that are free now.
        arithmetic: dtypes of their forwards.
        sharded: see `update_bytes`.
    """
    trained = [r for r in roots if any(p.requires_grad for p in r.parameters())]
    costs = [
        activation_bytes(
            model.config, arithmetic, fused=fused_parts(model), checkpointing=_checkpointing(model)
        )
        for root in trained
        for model in _decoders(root)
    ]
    if not costs:
        return TOKENS
    left = USABLE * free - update_bytes(roots, arithmetic, sharded=sharded)
    return max(min(int(left / max(costs)), TOKENS), 1)


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a CUDA device that tensors may still take."""
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free) + cached


def _checkpointing(model: PreTrainedModel) -> bool:
    name = "is_activation_checkpointing"  # its name from transformers 5.23 on
    known = hasattr(type(model), name)
    return bool(getattr(model, name if known else "is_gradient_checkpointing"))


def _inner_size(config: Any) -> int:
    """Return the columns of an MLP that a token passes; of experts, those of all it is sent to."""
    experts = getattr(config, "num_experts_per_tok", None)
    if experts and getattr(config, "moe_intermediate_size", None):
        return int(experts * config.moe_intermediate_size)
    size = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return int(size or 4 * config.hidden_size) * (experts or 1)


def _decoders(root: nn.Module) -> Iterator[PreTrainedModel]:
    """Yield the outermost Hugging Face models inside `root`."""
    if isinstance(root, PreTrainedModel):
        yield root
        return
    for child in root.children():
        yield from _decoders(child)


def _gathered(root: nn.Module) -> int:
    """Return the weights that FSDP2 holds whole at once: those of the root and of two layers."""
    lists = [m for m in root.modules() if isinstance(m, nn.ModuleList)]
    layers = max(lists, key=len, default=nn.ModuleList())
    inside = sum(p.numel() for p in layers.parameters())
    rest = sum(p.numel() for p in root.parameters()) - inside
    return rest + 2 * inside // max(len(layers), 1)


def _own_size(parameter: Any) -> int:
    """Return the elements that this rank holds."""
    own: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return own.numel()
