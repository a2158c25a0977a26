"""The switch `model.kernels`: norms, rotary embedding and gated MLP of decoders on CUDA, fused.

`use_gpu_kernels` gives instances a `forward` of their own, once they are on the device; classes
stay as transformers wrote them, and so do modules that later go back to a CPU. With `liger-kernel`
norms, rotations and MLPs are Liger's kernels; without it norms are torch's.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_lightning.models.way import Way

# Architectures whose norm, rotation and MLP (with silu) are Llama's.
KNOWN = ("llama", "mistral", "qwen2", "qwen3")
# What these return is read by matrices alone, which autocast would cast it for one by one.
BEFORE_MATRICES = ("input_layernorm", "post_attention_layernorm")
ROTATION = "apply_rotary_pos_emb"
DEVICE = "cuda"
_way = Way("model.kernels", "torch")


def gpu_kernels(way: str) -> AbstractContextManager[None]:
    """Choose the kernels of models that are placed on CUDA inside.

    Args:
        way: "auto" for fused kernels where the architecture is known, Liger's where liger-kernel is
            installed; "torch" for the modules as transformers wrote them.

    Raises:
        ValueError: for another one.
    """
    return _way.chosen_by(way)


def fuses() -> bool:
    """Return whether kernels are fused on CUDA."""
    return _way.name == "auto"


def has_liger() -> bool:
    """Return whether Liger's kernels are used where kernels are fused."""
    return fuses() and importlib.util.find_spec("liger_kernel") is not None


def compiles_head(device: torch.device) -> bool:
    """Return whether log-probabilities are computed there by compiled chunks; it needs Triton."""
    return device.type == DEVICE and fuses() and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def use_gpu_kernels(root: nn.Module) -> None:
    """Let the decoders inside `root` that are on CUDA compute by fused kernels, in place."""
    for model in root.modules() if fuses() else ():
        if isinstance(model, PreTrainedModel) and model.config.model_type in KNOWN:
            device = next((p.device.type for p in model.parameters()), "cpu")
            if device == DEVICE:
                fuse_layers(model, liger=has_liger())


def is_fused(module: nn.Module) -> bool:
    """Return whether `module` has a `forward` of this file, which computes what its class does."""
    own, of_class = vars(module).get("forward"), cast("Any", type(module))
    return isinstance(own, MethodType) and own.__func__ in (*PARTS, _rotating(of_class))


def fused_parts(root: nn.Module) -> set[str]:
    """Return which of "norms" and "MLPs" inside `root` are one kernel each."""
    own = (vars(module).get("forward") for module in root.modules())
    return {PARTS[f.__func__] for f in own if isinstance(f, MethodType) and f.__func__ in PARTS}


def kernels_of(roots: Sequence[nn.Module]) -> str:
    """Return in words which kernels placed models use."""
    if not fuses():
        return "those of transformers and torch (model.kernels=torch)"
    parts = set().union(*map(fused_parts, roots))
    head = "compiled head" if _has_triton() else "plain head (Triton is not installed)"
    if not parts:
        return f"those of transformers (fused for {', '.join(KNOWN)}); {head}"
    whose = "Liger's" if has_liger() else "torch's (Liger's with 'rlhf-lightning[gpu]')"
    return f"{whose}, for {' and '.join(sorted(parts))}; {head}"


def fuse_layers(model: Any, *, liger: bool) -> None:
    """Replace the `forward` of norms, attention and MLPs of one decoder; see `use_gpu_kernels`."""
    name = model.config.model_type
    modeling: Any = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    norm, attention, mlp = (
        getattr(modeling, f"{name.capitalize()}{part}") for part in ("RMSNorm", "Attention", "MLP")
    )
    forwards: dict[type, Any] = {norm: liger_norm if liger else torch_norm}
    if liger and model.config.hidden_act in ("silu", "swish"):
        forwards[mlp] = liger_mlp
    if liger and (rotating := _rotating(attention)) is not None:
        forwards[attention] = rotating
    for path, module in model.named_modules():
        forward = forwards.get(type(module))
        if forward is None or "forward" in vars(module):
            continue
        if path.rpartition(".")[2] in BEFORE_MATRICES:
            forward = liger_norm_before_matrices if liger else torch_norm_before_matrices
        module.forward = MethodType(forward, module)


# -- forwards of instances; off CUDA they are those of the class -----------------------------------


def torch_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """Return RMSNorm by torch's kernel, in the dtype that the class returns."""
    if hidden_states.device.type != DEVICE:
        return _plain(self, hidden_states)
    dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
    with torch.autocast(DEVICE, enabled=False):
        states, weight = hidden_states.to(dtype), self.weight.to(dtype)
        return nn.functional.rms_norm(states, weight.shape, weight, self.variance_epsilon)


def torch_norm_before_matrices(self: Any, hidden_states: Tensor) -> Tensor:
    """Return `torch_norm` in the dtype of the matrix products that read it."""
    return _in_autocast_dtype(torch_norm(self, hidden_states))


def liger_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """Return RMSNorm by Liger's kernel; the gradient that it gets is not written over."""
    if hidden_states.device.type != DEVICE:
        return _plain(self, hidden_states)
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    normed: Tensor = LigerRMSNormFunction.apply(
        hidden_states, self.weight, self.variance_epsilon, 0.0, "llama", False
    )
    return normed


def liger_norm_before_matrices(self: Any, hidden_states: Tensor) -> Tensor:
    """Return `liger_norm` in the dtype of the matrix products that read it."""
    return _in_autocast_dtype(liger_norm(self, hidden_states))


def liger_mlp(self: Any, x: Tensor) -> Tensor:
    """Return the gated MLP, whose product with silu is Liger's kernel."""
    if x.device.type != DEVICE:
        return _plain(self, x)
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    gated = LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x))
    result: Tensor = self.down_proj(gated)
    return result


PARTS = {
    torch_norm: "norms",
    torch_norm_before_matrices: "norms",
    liger_norm: "norms",
    liger_norm_before_matrices: "norms",
    liger_mlp: "MLPs",
}


def _plain(self: Any, states: Tensor) -> Tensor:
    result: Tensor = type(self).forward(self, states)
    return result


def _in_autocast_dtype(normed: Tensor) -> Tensor:
    if normed.device.type == DEVICE and torch.is_autocast_enabled(DEVICE):
        return normed.to(torch.get_autocast_dtype(DEVICE))
    return normed


@cache
def _rotating(attention: Any) -> Callable[..., Any] | None:
    """Return the forward of an attention class with another rotation; None if it cannot be had.

    The rotation is a global of its module. The code of the forward gets globals of its own, so that
    other models of the architecture keep theirs.
    """
    forward = attention.forward
    plain = forward.__globals__.get(ROTATION)
    if ROTATION not in forward.__code__.co_names or forward.__closure__ or plain is None:
        return None

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> Any:
        if rest or q.device.type != DEVICE:
            return plain(q, k, cos, sin, *rest)
        from liger_kernel.ops.rope import LigerRopeFunction

        # In place: what makes queries and keys keeps its inputs for the backward pass, never them.
        return LigerRopeFunction.apply(q, k, cos, sin)

    found = FunctionType(
        forward.__code__,
        {**forward.__globals__, ROTATION: rotate},
        forward.__name__,
        forward.__defaults__,
    )
    found.__kwdefaults__ = forward.__kwdefaults__
    return found
