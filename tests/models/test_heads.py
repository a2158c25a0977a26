from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_lightning.models.heads import PolicyModel
from tests.builders.models import VOCABULARY, tiny_policy, tiny_scalar_model


class _SoftCapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.config = model, model.config
        self.base_model = model.base_model

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    def forward(self, **inputs: torch.Tensor):
        output = self.inner(**inputs)
        output.logits = output.logits.clamp(-1, 1)
        return output


def test_a_model_that_changes_its_logits_after_the_head_is_refused():
    with pytest.raises(ValueError, match="_SoftCapped changes its logits"):
        PolicyModel(_SoftCapped(tiny_policy("llama").model))


def test_a_scalar_heads_gradients_are_not_rounded_when_backward_runs_under_autocast():
    torch.manual_seed(0)
    model = tiny_scalar_model()
    nn.init.normal_(model.head.weight)
    ids, positions = torch.randint(2, VOCABULARY, (2, 8)), torch.arange(16)
    hidden = []
    model.trunk.register_forward_hook(lambda *found: hidden.append(found[-1].last_hidden_state))
    with torch.autocast("cpu", torch.bfloat16):
        scalars = model(ids, positions)
        hidden[0].retain_grad()
        (scalars * torch.arange(1.0, 17.0) / 3).sum().backward()
    grad = torch.arange(1.0, 17.0) / 3
    states, got = hidden[0].detach().flatten(0, 1).float(), hidden[0].grad.flatten(0, 1).float()
    torch.testing.assert_close(model.head.weight.grad, (grad @ states).unsqueeze(0))
    torch.testing.assert_close(model.head.bias.grad, grad.sum().unsqueeze(0))
    torch.testing.assert_close(got, grad.unsqueeze(-1) * model.head.weight.detach())


def test_normalize_maps_scores_to_mean_0_and_std_1_and_keeps_their_order():
    model = tiny_scalar_model(bias=0.7)
    ids, positions = torch.randint(2, VOCABULARY, (64, 8)), torch.arange(64) * 8 + 7
    with torch.no_grad():
        before = model(ids, positions)
        mean, std = float(before.mean()), float(before.std(unbiased=False))
        assert abs(mean) > 0.1
        assert abs(std - 1) > 0.1
        model.normalize(mean, std)
        after = model(ids, positions)
    assert abs(float(after.mean())) < 1e-5
    assert abs(float(after.std(unbiased=False)) - 1) < 1e-5
    torch.testing.assert_close(after, (before - mean) / std, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("std", [0.0, float("nan")])
def test_normalize_refuses_a_std_that_is_not_positive(std):
    with pytest.raises(ValueError, match=f"std={std}"):
        tiny_scalar_model().normalize(0.0, std)
