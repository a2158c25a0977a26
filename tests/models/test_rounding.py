"""Weights in the dtype of their base, and what is lost by it."""

from __future__ import annotations

import pytest
import torch

from rlhf_lightning import LoraHparams, SFTModule, export_model
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.models.precision import round_frozen_weights, rounded
from tests.builders.models import tiny_policy, tiny_tokenizer

BF16 = torch.bfloat16


def grid(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(BF16).float()


def test_tied_weights_stay_tied_and_integers_stay_whole():
    weight = grid(4, 4)
    made = rounded({"a": weight, "b": weight, "n": torch.tensor([3])}, BF16)
    assert made["a"].data_ptr() == made["b"].data_ptr()
    assert made["a"].dtype == BF16
    assert made["n"].dtype == torch.int64
    same = rounded({"a": weight}, torch.float32)
    assert same["a"] is weight


@pytest.mark.parametrize("size", [1e-4, 0.1])
def test_a_young_adapter_that_was_merged_and_is_rounded_away_is_named(size, tmp_path, caplog):
    base, merged = tmp_path / "base", tmp_path / "merged"
    tiny_policy("llama").model.to(BF16).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    module = SFTModule.from_pretrained(base, lora=LoraHparams(r=4, alpha=8))
    module.configure_model()
    for name, half in module.policy.adapter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(half, std=size)
    export_model(module, merged)
    policy, before = load_policy(merged), load_policy(base)
    layers = [model.model.model.layers for model in (before, policy)]
    was, now = (one[0].self_attn.q_proj.weight.detach() for one in layers)
    kept = ((now.to(BF16).float() - was) * (now - was)).sum() / (now - was).square().sum()
    assert (kept < 0.5) == (size < 0.01)
    round_frozen_weights(policy.model, "32-true")
    assert "keeps" not in caplog.text
    round_frozen_weights(policy.model, "bf16-mixed")
    told = f"of what the adapter changed that is merged in {merged}"
    assert (told in caplog.text) == (kept < 0.5)
