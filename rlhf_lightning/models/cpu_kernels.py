"""The switch `model.cpu_kernels`, and the only module that imports `models.cpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

_enabled = True


@contextmanager
def cpu_kernels(enabled: bool) -> Iterator[None]:
    """Use the CPU kernels inside if `enabled`, and if they are not switched off outside."""
    global _enabled
    before, _enabled = _enabled, _enabled and enabled
    try:
        yield
    finally:
        _enabled = before


def prepare(model: PreTrainedModel, *, adapted: bool = False) -> None:
    """Let `model` compute by the CPU kernels wherever it is on a CPU, unless they are off.

    Args:
        model: the model, changed in place.
        adapted: it is the base of adapters: its layers stay as they are, so that it computes the
            same bits with adapters that are off and without any.
    """
    if _enabled:
        from rlhf_lightning.models import cpu

        cpu.prepare(model, adapted=adapted)


def packs_rows(model: nn.Module) -> bool:
    """Return whether `model` takes rows one after the other, as `row_lengths`, and where it is now.

    False where the kernels are off.
    """
    if not _enabled:
        return False
    from rlhf_lightning.models.cpu import row_blocks

    return row_blocks.packs_rows(model)


def packed_head_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a head multiplies states of packed rows, instead of `dtype`."""
    from rlhf_lightning.models.cpu.weight_grads import product_dtype

    return product_dtype(dtype)


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
    from rlhf_lightning.models.cpu import attention

    return attention.one_token_attention(model)


def packed_linear(
    weight: Tensor, bias: Tensor | None, *, rows: int
) -> Callable[[Tensor], Tensor] | None:
    """Return `x W' + b` with `weight` packed for about `rows` rows; None where it cannot be."""
    if not _enabled:
        return None
    from rlhf_lightning.models.cpu.packed_weights import packed_linear

    return packed_linear(weight, bias, rows)


class SideBySide(NamedTuple):
    """Runner of separate tasks, two at a time, each by half of the threads.

    Args:
        run: tasks -> what they return.
        sum: losses of separate graphs -> their sum, whose backward pass is theirs side by side.
    """

    run: Callable[[Sequence[Callable[[], Any]]], list[Any]]
    sum: Callable[[Sequence[Tensor]], Tensor]


def side_by_side(*models: Any) -> SideBySide | None:
    """Return what lets `models` compute at the same time; None where they must take turns.

    They must share no weight, be plain models on a CPU, and torch have several threads.
    """
    if not _enabled:
        return None
    from rlhf_lightning.models.cpu.side_by_side import can_run_beside, run_beside, sum_of_losses

    return SideBySide(run_beside, sum_of_losses) if can_run_beside(models) else None
