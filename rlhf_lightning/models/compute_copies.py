"""bf16 copies of trained matrices, for the forwards and backwards of one optimizer step.

Autocast casts every fp32 weight in every micro-batch, and every gradient of one back. Here each is
cast once: inside `compute_copies` a layer multiplies by a bf16 leaf, whose gradient is added to the
fp32 gradient of its master as soon as it is complete. Forwards have the bits of autocast's, and so
have gradients, as both round a micro-batch's gradient of a weight to bf16 and add in fp32.

Copies live no longer than the optimizer step that they are made for: nothing has to be refreshed,
and no state dict, export or evaluation sees them. FSDP2 does the same by its mixed precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


@contextmanager
def compute_copies(module: nn.Module, *, devices: Sequence[str] = ("cuda",)) -> Iterator[None]:
    """Let the layers of `module` multiply by bf16 copies inside, where autocast would cast.

    These are `Linear` and `Conv1D` layers with an fp32 weight on one of `devices` whose autocast is
    on. Layers with a `forward` of their own, sharded ones, embeddings, norms and the heads of
    language models, which are computed in chunks, are left alone.

    Args:
        module: no optimizer changes its weights inside.
        devices: kinds of devices.
    """
    on = [device for device in devices if torch.is_autocast_enabled(device)]
    changed: list[Any] = []
    try:
        decoders = [m for m in module.modules() if on and isinstance(m, PreTrainedModel)]
        heads = [decoder.get_output_embeddings() for decoder in decoders]
        for layer in module.modules() if on else ():
            if _is_plain(layer) and not any(layer is head for head in heads):
                device = layer.weight.device.type
                if device in on:
                    layer.forward = _forward(layer, torch.get_autocast_dtype(device))
                    changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward


def _is_plain(layer: Any) -> bool:
    if type(layer) not in (nn.Linear, Conv1D) or "forward" in vars(layer):
        return False
    sharded = hasattr(layer.weight, "to_local")  # FSDP2 has copies of its own
    return layer.weight.dtype == torch.float32 and not sharded


def _forward(layer: Any, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    weight = _copy(layer.weight, dtype)
    bias = None if layer.bias is None else _copy(layer.bias, dtype)
    if type(layer) is nn.Linear:
        return lambda x: linear(x, weight, bias)
    assert bias is not None
    return lambda x: torch.addmm(bias, x.view(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)


def _copy(master: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a leaf whose gradients end in `master.grad`."""
    copy = master.detach().to(dtype)
    if not master.requires_grad:
        return copy

    def move_gradient(copy: Tensor) -> None:
        gradient, copy.grad = copy.grad, None
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)

    copy.requires_grad_().register_post_accumulate_grad_hook(move_gradient)
    return copy
