"""Adapters on mixtures of experts that have linear layers beside their experts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.adapter_files import load_policy_adapter, merge_adapter, save_adapter
from rlhf_lightning.models.factory import load_base, load_policy
from rlhf_lightning.models.lora import AdaptedPolicy
from tests.builders.models import config_fields
from tests.models.test_lora import IDS, POSITIONS, TOKENS, logprobs

LORA = LoraHparams(r=4, alpha=8, dropout=0.1)

_SHAPE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
_DENSE_FIRST = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LINEAR = {f"linear_{of}": n for of, n in [("num_key_heads", 2), ("num_value_heads", 2)]}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _SHAPE | {"num_experts": 4, "mlp_only_layers": [0]},
    "deepseek_v3": _SHAPE
    | _DENSE_FIRST
    | {"q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 16}
    | {"head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
    | {"moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_interval": 1},
    "qwen3_next": _SHAPE
    | {"num_experts": 4, "shared_expert_intermediate_size": 16}
    | _LINEAR
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    | {"layer_types": ["linear_attention", "full_attention"]},
}


def saved(folder: Path, model_type: str, **fields: Any) -> Path:
    config = config_fields("llama", num_key_value_heads=2, **fields) | {"model_type": model_type}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(folder)
    return folder


def trained(folder: Path) -> AdaptedPolicy:
    """An adapter after a step on every weight that trains."""
    policy = load_policy(folder, lora=LORA, seed=1)
    logprobs(policy).sum().backward()  # B has a gradient, A gets its own with the next step
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            assert (parameter.grad.abs().max() > 0) == ("lora_B" in name), name
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(2))
    return policy.eval()


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name == "deepseek_v3" else pytest.mark.thorough)
        for name in MIXTURES
    ],
)
def test_dense_layers_beside_experts_are_trained_merged_and_read_by_peft(model_type, tmp_path):
    folder = saved(tmp_path / "base", model_type, **MIXTURES[model_type])
    policy = trained(folder)
    paths = {
        name.removesuffix(".weight") for name, _ in load_policy(folder).model.named_parameters()
    }
    assert set(policy.base.targets) <= paths
    assert any(path.endswith("mlp.gate_proj") or "shared" in path for path in policy.base.targets)
    assert set(policy.base.layers) == set(policy.base.targets)
    expected = logprobs(policy)
    assert (expected - logprobs(AdaptedPolicy(policy.base, None).eval())).abs().max() > 0.1

    merged = merge_adapter(policy, policy.state_dict(), load_policy(folder))
    torch.testing.assert_close(logprobs(merged), expected, rtol=1e-4, atol=1e-4)

    adapter = tmp_path / "adapter"
    save_adapter(policy, adapter, policy.state_dict(), base=str(folder), base_fingerprint="")
    again = load_policy_adapter(load_base(folder, LORA), adapter, "policy").eval()
    assert torch.equal(logprobs(again), expected)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    with torch.no_grad():
        logits = theirs(input_ids=IDS).logits.log_softmax(-1).flatten(0, 1)[POSITIONS]
    got = logits.gather(1, TOKENS[:, None])[:, 0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_mixture_says_that_its_experts_are_not_adapted(tmp_path, caplog):
    # Another size than above: a text is logged once.
    folder = saved(tmp_path, "mixtral", num_local_experts=4, vocab_size=80)
    with caplog.at_level(logging.WARNING):
        base = load_policy(folder, lora=LoraHparams(r=2, alpha=2)).base
    assert f"{len(base.targets)} matrices" in caplog.text
    assert "experts (down_proj, gate_up_proj)" in caplog.text
