"""Rounded weights are kept once a weight, and never handed out for another one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rlhf_lightning.models.activation_checkpointing import checkpoint_activations
from rlhf_lightning.models.cpu import llama_layer as fused_layer
from rlhf_lightning.models.cpu import weight_cache as rounded_weights
from rlhf_lightning.models.cpu.weight_cache import keeping_rounded_weights, rounded
from tests.models.test_fused_layer import fused, llama

BF16 = torch.bfloat16


def accumulated(*, checkpointing: bool, roundings: list[tuple[torch.Size, int]]) -> list[Tensor]:
    """Return the gradients of three micro-batches; note what is kept after each."""
    model = fused(llama()).train()
    if checkpointing:
        checkpoint_activations(model)
    with keeping_rounded_weights():
        for shift in range(3):
            ids = (torch.arange(24).view(2, 12) + shift) % 64
            with torch.autocast("cpu", BF16, cache_enabled=False):
                model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).mean().backward()
            kept = rounded_weights._kept.get().values()
            roundings.append((len(kept), sum(result.numel() for _, _, result in kept)))
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_checkpointed_layers_keep_one_copy_of_the_weights_however_many_micro_batches():
    plain, checkpointed = [], []
    expected = accumulated(checkpointing=False, roundings=plain)
    got = accumulated(checkpointing=True, roundings=checkpointed)
    assert plain[0][0] == 2 * 7, "two layers of seven matrices"
    assert plain == [plain[0]] * 3
    assert checkpointed == plain
    # Of a weight that autograd adds up, each product is rounded first.
    for a, b in zip(got, expected, strict=True):
        assert (a - b).norm() < 0.01 * b.norm()


def test_a_copy_is_made_once_for_every_weight_of_a_checkpointed_model(monkeypatch):
    made: list[int] = []

    def counted(weight: Tensor, dtype: torch.dtype) -> Tensor:
        result = rounded(weight, dtype)
        made.append(result.data_ptr())
        return result

    monkeypatch.setattr(fused_layer, "rounded", counted)
    accumulated(checkpointing=True, roundings=[])
    assert len(made) > 100
    assert len(set(made)) == 14


def test_a_weight_in_recycled_memory_gets_its_own_rounding():
    def addresses() -> set[int]:
        seen = set()
        for number in range(100):
            weight = nn.Parameter(torch.full((64, 64), float(number)))
            seen.add(weight.data_ptr())
            assert (rounded(weight, BF16) == number).all()
            del weight
        return seen

    assert len(addresses()) < 100, "memory is not recycled: this shows nothing"
    with keeping_rounded_weights():
        assert len(addresses()) == 100, "the memory of what is kept is not another's"


def replaced(weight: nn.Parameter) -> None:
    weight.data = torch.full_like(weight, 3.0)


def written(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.fill_(3.0)


def swapped(weight: nn.Parameter) -> None:
    weight.detach().copy_(torch.full_like(weight, 3.0))


@pytest.mark.parametrize("change", [replaced, written, swapped])
def test_a_weight_that_was_changed_is_rounded_again(change: Callable[[nn.Parameter], None]):
    weight = nn.Parameter(torch.zeros(4, 4))
    with keeping_rounded_weights():
        assert (rounded(weight, BF16) == 0).all()
        change(weight)
        assert (rounded(weight, BF16) == 3).all()


def test_two_readings_of_one_memory_are_two_weights():
    weight = torch.arange(12.0).view(3, 4)
    with keeping_rounded_weights():
        for view in (weight, weight.T, weight[1:], weight[:, 1:], weight.view(4, 3)):
            assert torch.equal(rounded(view, BF16), view.bfloat16())
        assert rounded(weight, torch.float16).dtype == torch.float16
        assert rounded(weight, BF16).dtype == BF16
