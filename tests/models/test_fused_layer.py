"""Llama's layers written out: the plain layers' numbers and gradients, fewer operations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_lightning.models.cpu.attention import use_short_attention
from rlhf_lightning.models.cpu.llama_layer import FusedLlamaDecoderLayer, use_fused_layers


def llama(**changes: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes | heads | changes))
        for name, parameter in model.named_parameters():
            if "norm" in name:
                nn.init.uniform_(parameter, 0.5, 1.5)
    use_short_attention(model)
    return model


def fused(model: LlamaForCausalLM) -> LlamaForCausalLM:
    other = copy.deepcopy(model)
    use_fused_layers(other)
    return other


def states_and_gradients(
    model: LlamaForCausalLM, *, positions: int, bf16: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.arange(3 * positions).view(3, positions).square() % 64
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        states = model.model(input_ids=ids, use_cache=False).last_hidden_state
    (states.float() * torch.sin(torch.arange(96.0))).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return states.detach(), gradients


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in a)


@pytest.mark.parametrize("positions", [8, 40])  # below the head size attention weights are kept
def test_states_and_every_gradient_are_those_of_the_plain_layers_in_fp32(positions):
    plain = llama()
    expected = states_and_gradients(plain, positions=positions, bf16=False)
    got = states_and_gradients(fused(plain), positions=positions, bf16=False)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
    assert distance(got[1], expected[1]) < 2e-6


@pytest.mark.parametrize("positions", [8, 40])
def test_in_bf16_they_are_as_near_to_fp32_as_those_of_the_plain_layers(positions):
    plain = llama()
    exact = states_and_gradients(plain, positions=positions, bf16=False)
    usual = states_and_gradients(plain, positions=positions, bf16=True)
    got = states_and_gradients(fused(plain), positions=positions, bf16=True)
    assert (got[0] - exact[0]).norm() < 1.1 * (usual[0] - exact[0]).norm()
    assert distance(got[1], exact[1]) < 1.1 * distance(usual[1], exact[1])


def test_a_frozen_layer_hands_gradients_on_and_gets_none():
    model = fused(llama())
    model.model.layers[1].requires_grad_(False)
    _, got = states_and_gradients(model, positions=8, bf16=True)
    assert not any("layers.1" in name for name in got)
    assert got["model.layers.0.mlp.down_proj.weight"].abs().max() > 0


@pytest.mark.parametrize(
    ("config", "call"),
    [
        ({"attention_bias": True}, {}),
        ({"hidden_act": "gelu"}, {}),
        ({"attention_dropout": 0.5}, {}),
        ({}, {"use_cache": True}),
        ({}, {"attention_mask": torch.tensor([[0, 1, 1, 1]])}),
    ],
)
def test_what_is_not_the_plain_case_runs_as_transformers_wrote_it(config, call, monkeypatch):
    plain = llama(**config)
    other = fused(plain)
    called = []
    usual = FusedLlamaDecoderLayer.__mro__[1].forward

    def counted(self: Any, *args: Any, **options: Any) -> Tensor:
        called.append(self)
        return usual(self, *args, **options)

    monkeypatch.setattr(FusedLlamaDecoderLayer.__mro__[1], "forward", counted)
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.random.fork_rng():
        torch.manual_seed(1)
        got = other(input_ids=ids, **call).logits
        assert len(called) == 2
        torch.manual_seed(1)
        assert torch.equal(got, plain(input_ids=ids, **call).logits)
