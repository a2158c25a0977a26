"""bf16 copies of weights for an optimizer step, against autocast over the fp32 weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rlhf_lightning.models.building import checkpoint_activations
from rlhf_lightning.models.compute_copies import compute_copies
from rlhf_lightning.models.cpu_kernels import cpu_kernels
from tests.builders.models import tiny_policy, tiny_scalar_model

FAMILIES = ("llama", "qwen2", "gpt2")
MICRO_BATCHES = 3


def built(model_type: str, scalar: bool = False) -> Any:
    with cpu_kernels(False):  # they cast no weights
        return tiny_scalar_model(model_type) if scalar else tiny_policy(model_type)


def step(model: Any, optimizer: torch.optim.Optimizer, copies: bool) -> list[torch.Tensor]:
    """Take an optimizer step on several micro-batches; return what the forwards gave."""
    found = []
    on = ("cpu",) if copies else ()
    with (
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        compute_copies(model, devices=on),
    ):
        for seed in range(MICRO_BATCHES):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(2, 40, (3, 16), generator=generator)
            positions = torch.arange(5, 40)
            if hasattr(model, "head"):
                out = model(ids, positions)
            else:
                out = model(ids, positions, ids.flatten()[positions]).logprobs
            found.append(out.detach())
            out.sum().backward()
    optimizer.step()
    return found


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_two_optimizer_steps_have_the_bits_of_autocast(model_type, scalar):
    plain, copied = built(model_type, scalar), built(model_type, scalar)
    for model, copies in ((plain, False), (copied, True)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.outputs = [*step(model, optimizer, copies), *step(model, optimizer, copies)]
    for ours, theirs in zip(copied.outputs, plain.outputs, strict=True):
        assert torch.equal(ours, theirs)
    expected = gradients(plain)
    for name, gradient in gradients(copied).items():
        assert gradient is not None
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, expected[name]), name
    for name, weight in copied.state_dict().items():
        assert torch.equal(weight, plain.state_dict()[name]), name


def test_frozen_weights_get_no_gradient_and_repeated_layers_the_same_one():
    plain, copied = built("llama"), built("llama")
    checkpoint_activations(copied.model)
    for model, copies in ((plain, False), (copied, True)):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        step(model.train(), optimizer, copies)
    expected = gradients(plain)
    for name, gradient in gradients(copied).items():
        assert (gradient is None) == ("mlp" not in name)
        if gradient is not None:
            assert torch.equal(gradient, expected[name]), name
