from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_lightning.functional.logprobs import token_entropy
from rlhf_lightning.models.heads import (
    PolicyModel,
    ScalarHeadModel,
    TokenStatistics,
    scalar_head,
)
from tests.builders.models import HIDDEN, MODEL_TYPES, VOCABULARY, tiny_policy, tiny_scalar_model


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_policy_gives_the_models_own_log_probabilities_at_the_asked_positions(model_type):
    policy = tiny_policy(model_type)
    ids = torch.randint(2, VOCABULARY, (3, 8))
    positions = torch.tensor([2, 8 + 5, 16])
    with torch.no_grad():
        expected = policy.model(input_ids=ids).logits.flatten(0, 1)[positions]
        statistics = policy(ids, positions, torch.tensor([3, 4, 5]), 2.0)
        without = policy(ids, positions, torch.tensor([3, 4, 5]), 2.0, False)
    assert isinstance(statistics, TokenStatistics)
    wanted = (expected / 2.0).log_softmax(-1)[torch.arange(3), torch.tensor([3, 4, 5])]
    torch.testing.assert_close(statistics.logprobs, wanted, rtol=0, atol=1e-5)
    entropy = token_entropy(expected, temperature=2.0)
    torch.testing.assert_close(statistics.entropy, entropy, rtol=0, atol=1e-5)
    assert without.entropy is None
    assert torch.equal(without.logprobs, statistics.logprobs)


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


def test_scalars_are_float32_under_autocast():
    model = tiny_scalar_model()
    ids = torch.randint(2, VOCABULARY, (2, 8))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(ids, torch.tensor([3, 9])).dtype == torch.float32


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


@pytest.mark.parametrize("std", [0.0, -1.0, float("nan")])
def test_normalize_refuses_a_std_that_is_not_positive(std):
    with pytest.raises(ValueError, match=f"std={std}"):
        tiny_scalar_model().normalize(0.0, std)


def test_a_value_head_starts_at_zero_and_a_reward_head_small():
    assert (scalar_head(HIDDEN, init_std=0.0).weight == 0).all()
    torch.manual_seed(0)
    head = scalar_head(4096, init_std=4097**-0.5)
    assert float(head.weight.std()) == pytest.approx(4097**-0.5, rel=0.05)
    assert head.bias.item() == 0


def test_a_zero_head_gives_values_of_exactly_0():
    trunk = tiny_policy().model.base_model
    model = ScalarHeadModel(trunk, scalar_head(HIDDEN, init_std=0.0))
    ids = torch.randint(2, VOCABULARY, (2, 8))
    assert (model(ids, torch.arange(16)) == 0).all()


def test_a_head_that_autocast_would_round_is_refused():
    with pytest.raises(TypeError, match=r"head=Linear is no ScalarHead: use scalar_head"):
        ScalarHeadModel(tiny_policy().model.base_model, nn.Linear(HIDDEN, 1))
