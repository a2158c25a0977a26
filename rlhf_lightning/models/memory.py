"""Memory of models in training, in bytes, by a formula of their config; no model is built for it.

One source for two uses: `tokens_that_fit` sets a micro-batch on a GPU, `app/plan.py` adds a run up
before its launch. On an H100 (Qwen2-0.5B, rows of 768 tokens, torch 2.11) the peak of an update
grew by 1,606,520 bytes a token under autocast, by 1,387,044 with bf16 weights, and by 1,197,426
under autocast with fused norms and MLPs; `tests/models/test_memory.py` has the formula beside these
numbers, `benchmarks/memory.py` beside whole runs.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_lightning.functional.linear_logprobs import ON_CPU, ON_GPU
from rlhf_lightning.models.gpu_kernels import fused_parts
from rlhf_lightning.models.lora import ALL_LINEAR, target_modules
from rlhf_lightning.models.micro_batching import TOKENS

# fp32: no autocast. mixed: autocast over fp32 weights. bf16: weights and activations (FSDP2).
Arithmetic = Literal["fp32", "mixed", "bf16"]
# Of free memory: the rest is lost between blocks of the allocator, or needed by libraries.
USABLE = 0.9
GRADIENT, ADAM, COPY = 4, 8, 2  # bytes of a trained fp32 weight
# 4-bit numbers, and for every 64 of them one 8-bit constant and its share of a second one
# (Dettmers et al. 2023, section 3): 0.127 bits a weight beside the 4.
NF4 = (4 + 0.127) / 8
# Tables `[C, V]` in fp32 that the head holds at once: logits, log-probabilities, their gradient.
HEAD_TABLES = 3


class Counts(NamedTuple):
    """Elements of a causal language model's weights.

    Args:
        total: all of them.
        matrices: those of `Linear` and `Conv1D` layers, the head aside.
        head: those of the head, which may be tied to the embeddings.
        own_head: those of a head that is not tied.
        layer: those of one decoder layer.
        sides: rows and columns of the matrices that get adapters, which have r weights for each.
    """

    total: int
    matrices: int
    head: int
    own_head: int
    layer: int
    sides: int

    def held(self, arithmetic: Arithmetic, *, trunk: bool = False, nf4: bool = False) -> int:
        """Return the bytes of frozen weights: under autocast matrices are rounded, in bf16 all.

        Args:
            arithmetic: dtypes of its forwards.
            trunk: without an own head.
            nf4: matrices are quantised to 4 bits.
        """
        size = {"fp32": 4.0, "mixed": 2.0, "bf16": 2.0}[arithmetic]
        rest = self.total - self.matrices - trunk * self.own_head
        outside = 2 if arithmetic == "bf16" else 4
        return round(self.matrices * (NF4 if nf4 else size)) + outside * rest


def count_weights(config: PretrainedConfig, targets: str = ALL_LINEAR) -> Counts:
    """Return the weights of a model of this config, from its first two layers without storage."""
    config = copy.deepcopy(config)
    depth = int(config.get_text_config().num_hidden_layers)
    if depth < 3:
        return _count(config, depth, targets)
    one, two = (_count(config, layers, targets) for layers in (1, 2))
    found = Counts(*(few + (depth - 1) * (more - few) for few, more in zip(one, two, strict=True)))
    return found._replace(layer=two.total - one.total)


def _count(config: PretrainedConfig, layers: int, targets: str) -> Counts:
    text = config.get_text_config()
    text.num_hidden_layers = layers
    for name, value in list(vars(text).items()):
        if name.endswith("layer_types") and isinstance(value, list):  # a kind for each layer
            setattr(text, name, value[:layers])
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    head, total = model.get_output_embeddings(), sum(p.numel() for p in model.parameters())
    linear = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    tied = head.weight is model.get_input_embeddings().weight
    adapted = [model.get_submodule(path) for path in target_modules(model, targets)]
    size = int(head.weight.numel())
    return Counts(
        total=total,
        matrices=sum(p.numel() for m in linear for p in m.parameters(recurse=False)),
        head=size,
        own_head=0 if tied else size,
        layer=(total - size * (1 if tied else 2)) // max(layers, 1),
        sides=sum(sum(m.weight.shape) for m in adapted),
    )


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


def forward_bytes(config: PretrainedConfig, arithmetic: Arithmetic, length: int) -> int:
    """Return the bytes that a token needs in a forward without a graph: one MLP, and its mask.

    Args:
        config: config of the decoder.
        arithmetic: dtypes of its forward.
        length: columns of its row.
    """
    config = config.get_text_config()
    wide = 4 if arithmetic == "fp32" else 2
    return wide * (3 * _inner_size(config) + length) + 12 * int(config.hidden_size)


def cache_bytes(config: PretrainedConfig, arithmetic: Arithmetic) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    config = config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head_size
    return 2 * int(config.num_hidden_layers) * keys * (4 if arithmetic == "fp32" else 2)


def head_bytes(logits: int, head: int, *, device: str = "cuda", tables: float = HEAD_TABLES) -> int:
    """Return the bytes of the tables of logits, and of what is held of the head in an update.

    Args:
        logits: that are asked for: positions times vocabulary.
        head: elements of the weight: in bf16, its gradient in bf16 and in fp32. Zero without.
        device: whose chunks they are.
        tables: that are held at once.
    """
    chunk = (ON_CPU if device == "cpu" else ON_GPU).chunk
    return round(tables * min(chunk, 4 * logits)) + 6 * head


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
            if head is not None:
                total += head_bytes(ON_GPU.chunk, int(head.weight.numel()))
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
