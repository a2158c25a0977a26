"""Prepared weights compute what the model's own layers compute, and leave no trace."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_lightning.rollout.generators.prepared_weights import linear_weights_prepared
from tests.builders.models import HIDDEN, VOCABULARY, prompt_batch
from tests.rollout.plain_generation import ROWS, generated, tiny, without_cache


class _Casts(TorchDispatchMode):
    """Count casts of tensors with `numel` elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].numel() == self.numel:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_is_cast_once_a_generation_frozen_or_not(frozen):
    # Autocast never keeps the cast of a frozen weight: the base of LoRA would be cast every token.
    model = tiny(intermediate_size=61).requires_grad_(not frozen)
    casts = _Casts(61 * HIDDEN)
    with torch.autocast("cpu", torch.bfloat16), casts:
        generated(model, prompt_batch(ROWS))
    assert casts.count <= 3 * 2, "gate, up and down of two layers"


def test_layers_and_weights_are_as_before_even_after_an_error():
    model = tiny("gpt2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrong = torch.tensor([[VOCABULARY]])
    with pytest.raises(IndexError), linear_weights_prepared(model, rows=1):
        model(input_ids=wrong)
    generated(model, prompt_batch(ROWS))
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def adapted(model_type: str):
    """Return a tiny model with two adapters that are not zero, of which `second` is on."""
    model = tiny(model_type)
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        config = LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", init_lora_weights=False)
        inject_adapter_in_model(config, model, adapter_name=name)
    for layer in adapter_layers(model):
        layer.set_adapter("second")
    return model.eval()


def adapter_layers(model):
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_the_active_adapter_is_part_of_the_policy_and_the_others_are_not(model_type):
    plain = generated(tiny(model_type), prompt_batch(ROWS))
    model = adapted(model_type)
    with linear_weights_prepared(model, rows=4):
        assert all("forward" in vars(layer) for layer in adapter_layers(model)), "the premise"
    second = generated(model, prompt_batch(ROWS))
    assert second == without_cache(model, ROWS)
    for layer in adapter_layers(model):
        layer.set_adapter("first")
    assert plain != generated(model, prompt_batch(ROWS)) != second
    for layer in adapter_layers(model):
        layer.enable_adapters(False)
    assert generated(model, prompt_batch(ROWS)) == plain


def test_a_young_adapter_does_not_vanish_in_the_rounding_of_its_base():
    # Its product has entries of +-0.0032: less than half a step of bf16 at the base's 1.5.
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
    torch.nn.init.constant_(layer[0].weight, 1.5)
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=8, target_modules=["0"]), layer)
    layer.requires_grad_(False).eval()
    x = torch.tensor([[1.0, -1.0] * 4])
    layer[0].lora_A["default"].weight.copy_(0.02 * x.expand(2, -1))
    layer[0].lora_B["default"].weight.fill_(0.02)
    merged = (layer[0].base_layer.weight + layer[0].get_delta_weight("default")).bfloat16()
    assert (merged.float() @ x.T).abs().max() == 0, "the premise"
    with torch.autocast("cpu", torch.bfloat16), linear_weights_prepared(layer, rows=1):
        assert (layer(x).float() - 8 * 0.0032).abs().max() < 0.001
