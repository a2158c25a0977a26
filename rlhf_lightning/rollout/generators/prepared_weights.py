"""Linear layers with copies of their weights for the time of one generation.

One token reads every weight once, so generation is bound by the bytes of the weights. Each linear
layer gets a copy of its weight in the precision of the forward; `models.cpu_kernels` packs it.
Captured decoding keeps its copies where they are, and fills them anew for each generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from rlhf_lightning.distributed.collectives import is_sharded
from rlhf_lightning.models.cpu_kernels import packed_linear

Forward = Callable[[Tensor], Tensor]
Linear = nn.Linear | Conv1D
PLAIN = (Tensor, nn.Parameter)  # neither sharded nor quantised


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
    with _forwards_replaced(model, partial(_prepared_forward, rows=rows)):
        yield


@contextmanager
def _forwards_replaced(
    model: nn.Module, make: Callable[[Linear], Forward | None]
) -> Iterator[None]:
    """Let plain linear layers of `model`, and adapters on them, compute by what `make` returns."""
    changed: dict[nn.Module, Forward] = {}
    try:
        with_adapters = [module for module in model.modules() if type(module) is LoraLinear]
        halves = {half for module in with_adapters for half in _halves(module)}
        known: dict[tuple[int, int], Forward | None] = {}
        for module in model.modules():
            if is_plain_linear(module) and module not in halves:
                key = (id(module.weight), id(module.bias))  # tied weights are prepared once
                if key not in known:
                    known[key] = make(cast("Linear", module))
                _replace(module, known[key], changed)
        for module in with_adapters:
            if _is_plain_adapter(module):
                for half in _halves(module, active=True):
                    _replace(half, make(half), changed)
                _replace(module, _adapted_forward(module), changed)
        yield
    finally:
        for module in changed:
            del module.forward


class PreparedWeights:
    """Copies of linear layers' weights that stay at their addresses, for captured graphs.

    The projections that read one input (q, k and v; gate and up) share a tensor, so that one
    product can compute them all.

    Args:
        model: whose parameters may change in place between two uses.
    """

    STACKS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.copies: dict[nn.Module, tuple[Tensor, Tensor | None]] = {}
        self.stacks: dict[tuple[nn.Module, ...], tuple[Tensor, Tensor | None]] = {}
        if not any(map(is_sharded, model.modules())):
            for module in model.modules():
                for names in self.STACKS:
                    self._stack([getattr(module, name, None) for name in names])

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Fill the copies with the weights as they are now, and compute with them inside."""
        for module, (weight, bias) in self.copies.items():
            weight.copy_(cast("Tensor", module.weight))
            if bias is not None:
                bias.copy_(cast("Tensor", module.bias))
        with _forwards_replaced(self.model, self._forward_of):
            yield

    @property
    def num_bytes(self) -> int:
        """Memory of the copies."""
        tensors = {t.data_ptr(): t for pair in self.copies.values() for t in pair if t is not None}
        return sum(tensor.nbytes for tensor in tensors.values())

    def _stack(self, modules: Sequence[Any]) -> None:
        plain = [m for m in modules if is_plain_linear(m) and isinstance(m, nn.Linear)]
        biased = {module.bias is None for module in plain}
        if len(plain) < len(modules) or len(biased) > 1:
            return
        sizes = [module.out_features for module in plain]
        dtype = _compute_dtype(plain[0].weight)
        weight = plain[0].weight.new_empty((sum(sizes), plain[0].in_features), dtype=dtype)
        bias = None if plain[0].bias is None else weight.new_empty(sum(sizes))
        self.stacks[tuple(plain)] = weight, bias
        weights = torch.split(weight, sizes)
        biases = [None] * len(plain) if bias is None else torch.split(bias, sizes)
        for module, own, added in zip(plain, weights, biases, strict=True):
            self.copies[module] = own, added

    def _forward_of(self, module: Linear) -> Forward | None:
        if module not in self.copies:
            dtype = _compute_dtype(module.weight)
            if module.weight.dtype == dtype:
                return None
            own = None if module.bias is None else module.bias.detach().to(dtype)
            self.copies[module] = module.weight.detach().to(dtype), own
        weight, bias = self.copies[module]
        return _cast_forward(weight.t() if isinstance(module, Conv1D) else weight, bias)


def adapters_in_use(model: nn.Module) -> tuple[Any, ...]:
    """Return which adapters of each layer of `model` are on, and their scales."""
    return tuple(
        (tuple(module.active_adapters), module.disable_adapters, tuple(module.scaling.items()))
        for module in model.modules()
        if type(module) is LoraLinear
    )


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


def is_plain_linear(module: Any) -> bool:
    """Return whether `module` computes x W' + b and nothing else, with a plain weight."""
    forward = getattr(type(module), "forward", None)
    if forward is not nn.Linear.forward and forward is not Conv1D.forward:
        return False
    weight = module.weight
    plain = type(weight) in PLAIN and "forward" not in vars(module)
    return plain and cast("Tensor", weight).is_floating_point()


def _prepared_forward(module: Linear, *, rows: int) -> Forward | None:
    """Return a faster `forward` of `module`, or None where there is nothing to gain."""
    transposed = isinstance(module, Conv1D)
    weight = module.weight.detach()
    weight = weight.t() if transposed else weight
    dtype = _compute_dtype(weight)
    bias = None if module.bias is None else module.bias.detach().to(dtype)
    cast = weight.to(dtype)
    packed = packed_linear(cast, bias, rows=rows)
    if packed is not None or weight.dtype == dtype:
        return packed
    return _cast_forward(cast, bias)


def _compute_dtype(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _cast_forward(weight: Tensor, bias: Tensor | None) -> Forward:
    def forward(x: Tensor) -> Tensor:
        return functional.linear(x.to(weight.dtype), weight, bias)

    return forward
