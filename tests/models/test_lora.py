"""Adapters on one base: what they share, what they do not, and what is written of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.adapter_files import (
    CONFIG,
    load_policy_adapter,
    load_scalar_adapter,
    merge_adapter,
    read_adapter,
    save_adapter,
)
from rlhf_lightning.models.factory import load_base, load_policy, load_scalar_model
from rlhf_lightning.models.lora import AdaptedPolicy, add_policy, add_scalar_model
from rlhf_lightning.models.ppo_models import ADAPTER, policy_models, ppo_models
from tests.builders.models import MODEL_TYPES, tiny_policy

LORA = LoraHparams(r=4, alpha=8)
MIXED = LoraHparams(r=4, alpha=8, base_precision="bf16-mixed")
IDS = torch.arange(2, 34).reshape(2, 16)
POSITIONS = torch.arange(0, 30)
TOKENS = torch.arange(3, 33)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    for kind in MODEL_TYPES:
        tiny_policy(kind, seed=3).model.save_pretrained(root / kind)
    return {kind: root / kind for kind in MODEL_TYPES}


def shaken(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Move an adapter away from 0, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def logprobs(policy) -> Tensor:
    return policy(IDS, POSITIONS, TOKENS).logprobs


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_a_new_adapter_is_the_base_to_the_bit(folders, kind):
    base = load_base(folders[kind], LORA)
    policy = add_policy(base, "policy", seed=0)
    assert torch.equal(logprobs(policy), logprobs(AdaptedPolicy(base, None)))
    # A policy of its own may run other kernels: models.fused_layer.
    plain = load_policy(folders[kind])
    torch.testing.assert_close(logprobs(policy), logprobs(plain), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_a_trained_adapter_leaves_reference_and_neighbours_to_the_bit(folders, kind):
    base = load_base(folders[kind], LORA)
    policy = add_policy(base, "policy", seed=0)
    value = shaken(add_scalar_model(base, "value", init_std=0.3, seed=1), seed=5)
    reference = AdaptedPolicy(base, None)
    before, values = logprobs(reference), value(IDS, POSITIONS)
    shaken(policy)
    assert torch.equal(logprobs(reference), before)
    assert torch.equal(value(IDS, POSITIONS), values)
    assert (logprobs(policy) - before).abs().max() > 0.05


def test_gradients_of_one_adapter_reach_it_alone_though_another_graph_is_alive(folders):
    base = load_base(folders["gpt2"], LORA)
    policy = shaken(add_policy(base, "policy", seed=0))
    value = shaken(add_scalar_model(base, "value", init_std=0.3, seed=1))
    policy_loss = logprobs(policy).sum()
    value_loss = value(IDS, POSITIONS).sum()
    policy_loss.backward()
    assert all(p.grad is not None for p in policy.parameters())
    assert all(p.grad is None for p in value.parameters())
    value_loss.backward()
    assert all(p.grad is not None for p in value.parameters())


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_checkpointed_activations_change_no_gradient_whichever_adapter_is_on_later(folders, kind):
    gradients = []
    for checkpointing in (False, True):
        base = load_base(folders[kind], LORA, activation_checkpointing=checkpointing)
        policy = shaken(add_policy(base, "policy", seed=0))
        value = shaken(add_scalar_model(base, "value", init_std=0.3, seed=1), seed=2)
        loss = logprobs(policy).sum()
        other = value(IDS, POSITIONS).square().sum()
        with base.activated(None):  # the layers run again in here
            (loss + other).backward()
        gradients.append([p.grad for p in (*policy.parameters(), *value.parameters())])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_a_rounded_base_computes_the_bits_of_fp32_masters_under_autocast(folders, kind):
    rounded = AdaptedPolicy(load_base(folders[kind], MIXED), None)
    dtypes = {p.dtype for p in rounded.base.parameters()}
    assert dtypes == {torch.bfloat16, torch.float32}
    plain = load_policy(folders[kind])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logprobs(rounded), logprobs(plain))
    assert not torch.equal(logprobs(plain), plain_in_bf16(folders[kind]))


def plain_in_bf16(folder: Path) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return logprobs(load_policy(folder))


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_merged_weights_give_the_logits_of_base_and_adapter(folders, kind):
    policy = shaken(add_policy(load_base(folders[kind], LORA), "policy", seed=0))
    merged = merge_adapter(policy, policy.state_dict(), load_policy(folders[kind]))
    torch.testing.assert_close(logprobs(merged), logprobs(policy), rtol=1e-4, atol=1e-4)
    reward = shaken(load_scalar_model(folders[kind], head="reward", lora=LORA, seed=2), seed=4)
    reward.normalize(0.5, 2.0)
    whole = merge_adapter(reward, reward.state_dict(), load_policy(folders[kind]))
    assert whole.normalized
    torch.testing.assert_close(whole(IDS, POSITIONS), reward(IDS, POSITIONS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_peft_loads_the_adapter_alone(folders, kind, tmp_path):
    policy = shaken(add_policy(load_base(folders[kind], LORA), "policy", seed=0))
    save_adapter(
        policy, tmp_path, policy.state_dict(), base=str(folders[kind]), base_fingerprint="f"
    )
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folders[kind]), tmp_path
    )
    with torch.no_grad():
        expected = theirs(input_ids=IDS).logits.log_softmax(-1).flatten(0, 1)[POSITIONS]
    got = logprobs(policy)
    torch.testing.assert_close(got, expected.gather(1, TOKENS[:, None])[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_a_stored_reward_adapter_comes_back_onto_another_copy_of_its_base(folders, kind, tmp_path):
    reward = shaken(load_scalar_model(folders[kind], head="reward", lora=LORA, seed=2))
    reward.normalize(0.7, 2.0)
    save_adapter(
        reward, tmp_path, reward.state_dict(), base=str(folders[kind]), base_fingerprint="abc"
    )
    files = read_adapter(tmp_path)
    assert files.is_scalar
    assert files.base_fingerprint == "abc"
    assert files.reward_offset == pytest.approx(reward.head.bias.item())
    again = load_scalar_adapter(load_base(folders[kind], LORA), tmp_path, "reward")
    assert again.normalized
    assert torch.equal(again(IDS, POSITIONS), reward(IDS, POSITIONS))


@pytest.mark.parametrize(("key", "value"), [("use_rslora", True), ("rank_pattern", {"q_proj": 2})])
def test_an_adapter_of_peft_that_is_scaled_otherwise_is_refused_by_key(
    folders, tmp_path, key, value
):
    policy = add_policy(load_base(folders["llama"], LORA), "policy", seed=0)
    save_adapter(policy, tmp_path, policy.state_dict(), base="b", base_fingerprint="")
    file = tmp_path / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=rf"sets {key}, .*merge"):
        read_adapter(tmp_path)


def peft_model(folder: Path, **options) -> PeftModel:
    """A base on which PEFT has put an adapter of all matrices."""
    names = load_base(folder, LORA).targets
    config = LoraConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM", **options)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)


@pytest.mark.parametrize("drawn", ["pissa", "olora"])
def test_an_adapter_of_peft_that_changed_its_base_is_refused(folders, tmp_path, drawn):
    peft_model(folders["llama"], init_lora_weights=drawn).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"init_lora_weights='{drawn}', .*merge"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("drawn", [True, "gaussian"])
def test_an_adapter_of_peft_that_left_its_base_alone_is_loaded(folders, tmp_path, drawn):
    theirs = peft_model(folders["llama"], init_lora_weights=drawn).eval()
    shaken(torch.nn.ParameterList(p for p in theirs.parameters() if p.requires_grad))
    theirs.save_pretrained(tmp_path)
    ours = load_policy_adapter(load_base(folders["llama"], LORA), tmp_path, "policy")
    with torch.no_grad():
        expected = theirs(input_ids=IDS).logits.log_softmax(-1).flatten(0, 1)[POSITIONS]
    torch.testing.assert_close(
        logprobs(ours), expected.gather(1, TOKENS[:, None])[:, 0], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"modules_to_save": ["lm_head"]}, r"lm_head\.weight"),
        ({"bias": "lora_only"}, r"transformer\.h\.0\.attn\.c_attn\.base_layer\.bias"),
        ({"lora_bias": True}, r"transformer\.h\.0\.attn\.c_attn\.lora_B\.bias"),
    ],
)
def test_an_adapter_of_peft_with_other_tensors_is_refused_by_name(folders, tmp_path, options, name):
    peft_model(folders["gpt2"], **options).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"holds {name}.*merge"):
        read_adapter(tmp_path)


def test_ppo_goes_on_from_an_adapter_and_keeps_the_base_as_reference(folders, tmp_path):
    last = shaken(add_policy(load_base(folders["llama"], LORA), "policy", seed=0))
    save_adapter(last, tmp_path / ADAPTER, last.state_dict(), base="b", base_fingerprint="")
    models = ppo_models(folders["llama"], None, start=tmp_path, value_head="zero", lora=LORA)
    assert torch.equal(logprobs(models.policy), logprobs(last))
    base = AdaptedPolicy(load_base(folders["llama"], LORA), None)
    assert torch.equal(logprobs(models.reference), logprobs(base))
    assert not torch.equal(logprobs(models.policy), logprobs(models.reference))
    assert all(p.requires_grad for p in models.policy.parameters())


@pytest.mark.parametrize("other", [LoraHparams(r=4, alpha=64), LoraHparams(r=8, alpha=8)])
def test_training_goes_on_from_an_adapter_of_the_same_rank_and_scale_alone(
    folders, tmp_path, other
):
    last = add_policy(load_base(folders["llama"], LORA), "policy", seed=0)
    save_adapter(last, tmp_path / ADAPTER, last.state_dict(), base="b", base_fingerprint="")
    wanted = rf"lora\.r={other.r} lora\.alpha={other.alpha} .*use lora\.r=4 lora\.alpha=8"
    with pytest.raises(ValueError, match=wanted):
        policy_models(folders["llama"], start=tmp_path, lora=other)


def test_ppo_goes_on_from_a_policy_and_keeps_its_first_start_as_reference(folders, tmp_path):
    tiny_policy("llama", seed=9).model.save_pretrained(tmp_path)
    models = ppo_models(folders["llama"], None, start=tmp_path, value_head="zero")
    assert torch.equal(logprobs(models.policy), logprobs(load_policy(tmp_path)))
    assert torch.equal(logprobs(models.reference), logprobs(load_policy(folders["llama"])))


def test_a_reward_adapter_is_no_policy_to_go_on_from(folders, tmp_path):
    reward = load_scalar_model(folders["llama"], head="reward", lora=LORA)
    save_adapter(reward, tmp_path / ADAPTER, reward.state_dict(), base="b", base_fingerprint="")
    with pytest.raises(ValueError, match="give that of a policy"):
        ppo_models(folders["llama"], None, start=tmp_path, value_head="zero", lora=LORA)


def test_unknown_target_modules_are_refused_with_the_names_there_are(folders):
    with pytest.raises(ValueError, match=r"'query'.*k_proj"):
        load_base(folders["llama"], LoraHparams(target_modules="query,k_proj"))


def test_named_target_modules_alone_get_an_adapter(folders):
    base = load_base(folders["llama"], LoraHparams(target_modules="q_proj, v_proj"))
    names = set(add_policy(base, "policy", seed=0).state_dict())
    assert len(names) == 2 * 2 * 2
    assert all("q_proj" in name or "v_proj" in name for name in names)
