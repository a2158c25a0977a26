"""The switch `model.kernels`: decoder layers of full-sequence forwards by Liger, or compiled.

Layers keep their modules, and their weights the names of their state dicts: a `forward` is replaced
by one that chooses. Inside `full_sequences` it takes the kernels, elsewhere the layer as
transformers wrote it: generation, a token at a time, is plain, captured or not.

Must not import torch: commands read the switch before they load anything heavy.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Kernels = Literal["auto", "liger", "compile", "none"]
# Architectures whose norms, gated MLP and rotary embeddings Liger computes as transformers does.
KNOWN = ("llama", "mistral", "qwen2", "qwen3")
# Graphs of one layer: widths of one row and of several, with and without gradients, per adapter.
GRAPHS = 64
BACKEND = "inductor"

_kernels: Kernels = "auto"
_ON: ContextVar[bool] = ContextVar("full_sequences", default=False)


@contextmanager
def layer_kernels(kernels: Kernels) -> Iterator[None]:
    """Build models inside with these kernels.

    Args:
        kernels: "liger" for Liger's RMSNorm, rotary embeddings and SwiGLU; "compile" for
            `torch.compile` of each decoder layer; "auto" for Liger where there is CUDA, where it is
            installed and knows the architecture; "none" for the layers as they are.

    Raises:
        ValueError: if `kernels` is none of these.
    """
    global _kernels
    if kernels not in get_args(Kernels):
        raise ValueError(f"model.kernels={kernels} must be one of {', '.join(get_args(Kernels))}")
    before, _kernels = _kernels, kernels
    try:
        yield
    finally:
        _kernels = before


def compiles() -> bool:
    """Return whether layers of models that are built now are compiled."""
    return _kernels == "compile"


@contextmanager
def full_sequences(on: bool = True) -> Iterator[None]:
    """Let layers compute by their kernels inside; they do nowhere else."""
    token = _ON.set(on)
    try:
        yield
    finally:
        _ON.reset(token)


def as_now() -> AbstractContextManager[None]:
    """Return the context in which a layer is repeated as it is computed now, in any thread."""
    return full_sequences(_ON.get())


def use_layer_kernels(model: PreTrainedModel) -> None:
    """Let the decoder layers of `model` compute by the kernels of the switch, in place.

    Before a strategy shards the model: the hooks of FSDP2, like activation checkpointing, then stay
    around the layer, and nothing of them is compiled.

    Raises:
        ValueError: if the kernels were asked for by name and cannot be had.
    """
    if _kernels == "compile":
        _compile_layers(model)
    elif _kernels == "liger":
        problem = _no_liger(model)
        if problem is not None:
            raise ValueError(f"model.kernels=liger {problem}: use model.kernels=compile or none")
        _use_liger(model)
    elif _kernels == "auto" and _no_liger(model) is None:
        _use_liger(model)


# -- compiled layers -------------------------------------------------------------------------------


def _compile_layers(model: PreTrainedModel) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = False
    for layer in model.modules():
        kind: Any = type(layer)
        if isinstance(layer, GradientCheckpointingLayer) and not isinstance(layer, _Compiled):
            layer.__class__ = _compiled(kind)
        found |= isinstance(layer, _Compiled)
    if not found:
        raise ValueError(
            f"model.kernels=compile finds no decoder layers in {type(model).__name__}: use "
            "model.kernels=none"
        )


@cache
def _compiled(kind: Any) -> type:
    """Return `kind` with a compiled forward: one graph for all layers, whose weights it is given.

    A class, as transformers and FSDP2 put activation checkpointing and hooks around a class's
    `forward`. What cannot be compiled in one piece is an error, and so are too many graphs.
    """
    import torch
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, GRAPHS)
    graph = torch.compile(kind.forward, fullgraph=True, dynamic=True, backend=BACKEND)

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        return (graph if _ON.get() else kind.forward)(self, *args, **options)

    # Its name too: layers are found by it.
    return type(kind.__name__, (_Compiled, kind), {"forward": forward})


class _Compiled:
    """Marks compiled layers."""


# -- Liger -----------------------------------------------------------------------------------------


def _no_liger(model: PreTrainedModel) -> str | None:
    """Return why Liger's kernels cannot be had for `model`, or None."""
    import torch

    config = model.config
    if importlib.util.find_spec("liger_kernel") is None:
        return "needs liger-kernel (pip install -e '.[gpu]' in the checkout)"
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if config.model_type not in KNOWN:
        return f"knows {', '.join(KNOWN)}, not {config.model_type}"
    if config.hidden_act not in ("silu", "swish"):
        return f"knows SwiGLU with silu, not {config.hidden_act}"
    return None


def _use_liger(model: PreTrainedModel) -> None:
    """Replace norms and MLPs of `model`, and for all models of its architecture the rotation."""
    name = model.config.model_type
    modeling: Any = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    norm, mlp = (getattr(modeling, f"{name.capitalize()}{part}") for part in ("RMSNorm", "MLP"))
    for module in model.modules():
        if type(module) is norm:
            _replace(module, _liger_norm)
        elif type(module) is mlp:
            _replace(module, _liger_mlp)
    plain = modeling.apply_rotary_pos_emb
    if plain.__name__ != "chosen_rotation":
        modeling.apply_rotary_pos_emb = _rotation(plain)


def _replace(module: Any, forward: Callable[..., Any]) -> None:
    """Give a module a forward that takes `forward` inside `full_sequences`."""
    plain = type(module).forward

    def chosen(self: Any, x: Tensor) -> Any:
        return (forward if _ON.get() else plain)(self, x)

    module.forward = MethodType(chosen, module)


def _liger_norm(self: Any, hidden_states: Tensor) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # Not in place: the gradient that it would write into may be used elsewhere.
    normed: Tensor = LigerRMSNormFunction.apply(
        hidden_states, self.weight, self.variance_epsilon, 0.0, "llama", False
    )
    return normed


def _liger_mlp(self: Any, x: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    result: Tensor = self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))
    return result


def _rotation(plain: Callable[..., Any]) -> Callable[..., Any]:
    def chosen_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> Any:
        if not _ON.get() or rest:
            return plain(q, k, cos, sin, *rest)
        from liger_kernel.ops.rope import LigerRopeFunction

        # In place: what makes queries and keys keeps its inputs for the backward pass, never them.
        return LigerRopeFunction.apply(q, k, cos, sin)

    return chosen_rotation
