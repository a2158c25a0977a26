"""Weights in the dtype of their base, and what is lost by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.models.loading import load_config
from rlhf_lightning.models.rounding import base_dtype, measure_rounding, rounded
from rlhf_lightning.modules.export import save_hf_model
from tests.builders.models import tiny_policy, tiny_scalar_model, tiny_tokenizer

BF16 = torch.bfloat16


def grid(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(BF16).float()


@pytest.mark.parametrize(("step", "low", "high"), [(1e-6, 0.0, 0.01), (1.0, 0.999, 1.001)])
def test_rounding_keeps_large_steps_and_falls_back_from_small_ones(tmp_path, step, low, high):
    before = grid(64, 64)
    save_file({"w": before.to(BF16)}, tmp_path / "model.safetensors")
    after = before + step * grid(64, 64).flip(0)
    found = measure_rounding({"w": after}, str(tmp_path), BF16, revision=None)
    assert found.kept is not None
    assert low <= found.kept <= high
    expected = (after.to(BF16).float() - after).norm() / after.norm()
    assert found.error == pytest.approx(float(expected), rel=1e-5)


def test_tied_weights_stay_tied_and_integers_stay_whole():
    weight = grid(4, 4)
    made = rounded({"a": weight, "b": weight, "n": torch.tensor([3])}, BF16)
    assert made["a"].data_ptr() == made["b"].data_ptr()
    assert made["a"].dtype == BF16
    assert made["n"].dtype == torch.int64
    same = rounded({"a": weight}, torch.float32)
    assert same["a"] is weight


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_policy_in_bf16_is_half_as_large_and_names_its_dtype(tmp_path: Path, model_type: str):
    policy, tokenizer = tiny_policy(model_type), tiny_tokenizer(pad_is_eos=True)
    options = {"stop_ids": [int(tokenizer.eos_token_id)], "base_dtype": BF16}
    for name, dtype in (("full", torch.float32), ("half", BF16)):
        save_hf_model(
            policy, tokenizer, tmp_path / name, policy.state_dict(), dtype=dtype, **options
        )
    full, half = (load_file(tmp_path / name / "model.safetensors") for name in ("full", "half"))
    assert set(full) == set(half)
    for name, value in full.items():
        assert value.dtype == torch.float32
        assert torch.equal(half[name], value.to(BF16)), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == BF16
    assert load_policy(tmp_path / "half").model.dtype == torch.float32
    for name in ("full", "half"):  # so that the next stage knows it of either
        assert base_dtype(load_config(tmp_path / name, {})) == BF16


def test_a_reward_model_in_bf16_keeps_its_head_in_fp32(tmp_path: Path):
    model, tokenizer = tiny_scalar_model("llama", bias=0.3), tiny_tokenizer(pad_is_eos=True)
    stops = [int(tokenizer.eos_token_id)]
    save_hf_model(model, tokenizer, tmp_path, model.state_dict(), stop_ids=stops, dtype=BF16)
    weights = load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights.pop("score.weight"), model.head.weight)
    assert {value.dtype for value in weights.values()} == {BF16}
    again = load_scalar_model(tmp_path)
    assert torch.equal(again.head.weight, model.head.weight)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    # As the model card says.
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype="float32")
    assert torch.equal(plain.score.weight, model.head.weight)
