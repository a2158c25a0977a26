"""Linear layers with copies of their weights for the time of one generation.

One token reads every weight once, so generation is bound by the bytes of the weights. Each linear
layer gets a copy of its weight in the precision of the forward; `models.cpu_kernels` packs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from rlhf_lightning.models.cpu_kernels import packed_linear

Forward = Callable[[Tensor], Tensor]
Linear = nn.Linear | Conv1D


@contextmanager
def weights_cast_once() -> Iterator[None]:
    """Let autocast keep the weights it casts, for forwards between which no weight changes.

    Lightning turns that cache off, rightly for training: but then every token of a generation
    would cast every weight again.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.clear_autocast_cache()  # what was cast without a graph must not reach an update
        torch.set_autocast_cache_enabled(before)


@contextmanager
def linear_weights_prepared(model: nn.Module, *, rows: int) -> Iterator[None]:
    """Let the linear layers of `model` compute with prepared copies of their weights.

    Nothing is written to a parameter: each layer's `forward` is replaced for the while, and the
    copies are dropped afterwards. Weights that are not plain tensors (sharded, quantised) and
    layers whose `forward` is overridden are left alone. Costs 2 bytes a weight under autocast to 16
    bits, 4 in float32. Active adapters are not merged.

    Args:
        model: a model that no optimizer changes meanwhile.
        rows: how many rows a forward will usually have; only a hint for the layout.
    """
    changed: dict[nn.Module, Forward] = {}
    try:
        with_adapters = [module for module in model.modules() if type(module) is LoraLinear]
        halves = {half for module in with_adapters for half in _halves(module)}
        known: dict[tuple[int, int], Forward | None] = {}
        for module in model.modules():
            if _is_plain_linear(module) and module not in halves:
                key = (id(module.weight), id(module.bias))  # tied weights are prepared once
                if key not in known:
                    known[key] = _prepared_forward(cast("Linear", module), rows)
                _replace(module, known[key], changed)
        for module in with_adapters:
            if _is_plain_adapter(module):
                for half in _halves(module, active=True):
                    _replace(half, _prepared_forward(half, rows), changed)
                _replace(module, _adapted_forward(module), changed)
        yield
    finally:
        for module in changed:
            del module.forward


def _replace(module: nn.Module, forward: Forward | None, changed: dict[nn.Module, Forward]) -> None:
    if forward is not None:
        module.forward = changed[module] = forward


def _halves(module: LoraLinear, *, active: bool = False) -> list[nn.Linear]:
    """Return the two small layers of each adapter, or of those that are on."""
    names = [name for name in module.lora_A if not active or name in module.active_adapters]
    pairs = ((module.lora_A[name], module.lora_B[name]) for name in names)
    return [cast("nn.Linear", half) for pair in pairs for half in pair]


def _is_plain_adapter(module: LoraLinear) -> bool:
    """Return whether `module` adds B A x of its active adapters to its base, and nothing else."""
    variants = any(name in module.lora_variant for name in module.active_adapters)
    off = module.disable_adapters or module.merged
    return not (variants or off or module.training or "forward" in vars(module))


def _adapted_forward(module: LoraLinear) -> Forward:
    """Return the sum of base and adapters without what peft checks and converts every time.

    The product B A is not added to the prepared copy of the base: rounded to bf16, a young adapter
    would vanish in it, and the samples would be the reference's.
    """
    base = module.base_layer
    halves = _halves(module, active=True)
    scales = [module.scaling[name] for name in module.lora_A if name in module.active_adapters]
    parts = list(zip(halves[::2], halves[1::2], scales, strict=True))

    def forward(x: Tensor) -> Tensor:
        result: Tensor = base(x)
        for down, up, scale in parts:
            result = torch.add(result, up(down(x)).to(result.dtype), alpha=scale)
        return result

    return forward


def _is_plain_linear(module: nn.Module) -> bool:
    """Return whether `module` computes x W' + b and nothing else, with a plain weight."""
    forward = type(module).forward
    if forward is not nn.Linear.forward and forward is not Conv1D.forward:
        return False
    weight = module.weight
    plain = type(weight) in (Tensor, nn.Parameter) and "forward" not in vars(module)
    return plain and cast("Tensor", weight).is_floating_point()


def _prepared_forward(module: Linear, rows: int) -> Forward | None:
    """Return a faster `forward` of `module`, or None where there is nothing to gain."""
    transposed = isinstance(module, Conv1D)
    weight = module.weight.detach()
    weight = weight.t() if transposed else weight
    device = weight.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else weight.dtype
    bias = None if module.bias is None else module.bias.detach().to(dtype)
    cast = weight.to(dtype)
    packed = packed_linear(cast, bias, rows=rows)
    if packed is not None or weight.dtype == dtype:
        return packed
    return _cast_forward(cast, bias)


def _cast_forward(weight: Tensor, bias: Tensor | None) -> Forward:
    def forward(x: Tensor) -> Tensor:
        return functional.linear(x.to(weight.dtype), weight, bias)

    return forward
