"""The switch `model.cpu_kernels`, and the only module that imports `models.cpu`.

Must not import torch: commands read the switch before they load anything heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_enabled = True


@contextmanager
def cpu_kernels(enabled: bool) -> Iterator[None]:
    """Use the CPU kernels inside if `enabled`, and if they are not switched off outside.

    Raises:
        ValueError: if `enabled` is no truth value.
    """
    global _enabled
    if not isinstance(enabled, bool):
        raise ValueError(f"model.cpu_kernels={enabled} must be true or false")
    before, _enabled = _enabled, _enabled and enabled
    try:
        yield
    finally:
        _enabled = before


def prepare(model: PreTrainedModel, *, adapted: bool = False) -> None:
    """Let `model` compute by the CPU kernels wherever it is on a CPU, unless they are off.

    Args:
        model: changed in place.
        adapted: it is the base of adapters: its layers stay as they are, so that it computes the
            same bits with adapters that are off and without any.
    """
    if _enabled:
        from rlhf_lightning.models import cpu

        cpu.prepare(model, adapted=adapted)


def weight_grad_adder() -> Callable[[Tensor, Tensor, Tensor], Tensor | None] | None:
    """Return what adds the gradient of a matrix to `.grad`; None leaves it to autograd."""
    if not _enabled:
        return None
    from rlhf_lightning.models.cpu.weight_grads import accumulate_weight_grad

    return accumulate_weight_grad


def one_token_attention(model: PreTrainedModel) -> AbstractContextManager[bool]:
    """Let `model` attend from single tokens by the CPU kernels; yield whether it does."""
    if not _enabled:
        return nullcontext(False)
    from rlhf_lightning.models.cpu import decode_attention

    return decode_attention.one_token_attention(model)


def packed_linear(
    weight: Tensor, bias: Tensor | None, *, rows: int
) -> Callable[[Tensor], Tensor] | None:
    """Return `x W' + b` with `weight` packed for about `rows` rows; None where it cannot be."""
    if not _enabled:
        return None
    from rlhf_lightning.models.cpu.packed_weights import packed_linear

    return packed_linear(weight, bias, rows)
