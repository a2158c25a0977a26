from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rlhf_lightning.models.export import export_policy, export_scalar_model
from rlhf_lightning.models.factory import check_deterministic, load_policy, load_scalar_model
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.modules.rewards import score_clip_of
from rlhf_lightning.rollout.scorers.base import RewardModelScorer, WeightedScorer
from rlhf_lightning.rollout.scorers.reward_models import RewardEnsembleScorer
from tests.builders.models import (
    HIDDEN,
    MODEL_TYPES,
    PAD,
    VOCABULARY,
    config_fields,
    tiny_policy,
    tiny_scalar_model,
)

# The names that the four configs give to their dropouts, functional ones included.
DROPOUTS = {
    "gpt2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    "opt": ("dropout", "attention_dropout"),
    "llama": ("attention_dropout",),
    "gpt_neox": ("attention_dropout", "hidden_dropout"),
}
IDS = torch.randint(2, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(16)
TOKENS = torch.randint(2, VOCABULARY, (16,), generator=torch.Generator().manual_seed(1))


def logprobs(policy: PolicyModel) -> torch.Tensor:
    return policy(IDS, POSITIONS, TOKENS).logprobs


def with_dropout(model_type: str) -> dict[str, object]:
    return config_fields(model_type, **dict.fromkeys(DROPOUTS[model_type], 0.3))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_two_forwards_in_train_mode_are_bitwise_equal_whatever_the_config_says(model_type):
    policy = load_policy(from_scratch=with_dropout(model_type))
    assert policy.training
    assert torch.equal(logprobs(policy), logprobs(policy))
    check_deterministic(policy.model)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_model_with_dropout_is_found_and_keeps_its_mode(model_type):
    policy = load_policy(from_scratch=with_dropout(model_type), dropout=0.3)
    assert not torch.equal(logprobs(policy), logprobs(policy))
    policy.model.eval()
    with pytest.raises(ValueError, match=r"two forwards of .* in train mode differ"):
        check_deterministic(policy.model)
    assert not policy.model.training


def test_a_dropout_that_no_config_field_reaches_stops_the_loading(monkeypatch):
    build = AutoModelForCausalLM.from_config

    def leaky(*args: object, **options: object) -> nn.Module:
        model = build(*args, **options)
        model.lm_head = nn.Sequential(nn.Dropout(0.5), model.lm_head)
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", leaky)
    with pytest.raises(ValueError, match="dropout is still on"):
        tiny_policy("llama")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_loaded_policies_and_scalar_models_have_no_dropout_either(model_type, tmp_path):
    source = load_policy(from_scratch=with_dropout(model_type), dropout=0.3)
    export_policy(source, tmp_path, source.state_dict())
    written = json.loads((tmp_path / "config.json").read_text())
    assert any(written.get(name) == 0.3 for name in DROPOUTS[model_type])
    policy = load_policy(tmp_path)
    assert torch.equal(logprobs(policy), logprobs(policy))
    for head in ("zero", "reward"):
        model = load_scalar_model(tmp_path, head=head)
        assert model.training
        assert torch.equal(model(IDS, POSITIONS), model(IDS, POSITIONS))


def test_a_normalized_reward_model_survives_a_second_export(tmp_path):
    model = tiny_scalar_model("llama", bias=0.3)
    model.normalize(0.0, 1.0)
    for name in ("a", "b"):
        export_scalar_model(model, tmp_path / name, model.state_dict(), pad_token_id=PAD)
        model = load_scalar_model(tmp_path / name)
    first = load_scalar_model(tmp_path / "a")
    assert first.head.bias.item() == pytest.approx(0.3)
    assert first.normalized
    assert torch.equal(first(IDS, POSITIONS), model(IDS, POSITIONS))


@pytest.mark.parametrize(
    ("keys", "clip"),
    [
        ({"reward_offset": 0.3}, 5.0),  # of an older export of ours
        ({"reward_offset": 0.3, "reward_normalized": False}, None),
        ({}, None),
        ({"mean": 0.0, "std": 1.0}, 5.0),
        ({"mean": 2.0, "std": 3.0, "normalize_reward": False}, None),
    ],
)
def test_scores_of_another_frameworks_reward_model_are_clipped_only_if_it_normalizes_them(
    tmp_path, keys, clip
):
    model = tiny_scalar_model("llama", bias=0.3)
    export_scalar_model(model, tmp_path, model.state_dict(), pad_token_id=PAD)
    config = json.loads((tmp_path / "config.json").read_text())
    assert [config.pop(name) for name in ("reward_offset", "reward_normalized")][1] is False
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    alone = RewardModelScorer(lambda: load_scalar_model(tmp_path))
    several = RewardEnsembleScorer(lambda source: load_scalar_model(tmp_path), ["first", "second"])
    for scorer in (alone, several, WeightedScorer({"model": alone})):
        scorer.build()
        assert score_clip_of("auto", scorer) == clip


def test_it_is_said_where_a_score_of_another_framework_is_read(tmp_path, caplog):
    model = tiny_scalar_model("llama")
    for name in ("ours", "theirs"):
        export_scalar_model(model, tmp_path / name, model.state_dict(), pad_token_id=PAD)
    file = tmp_path / "theirs/config.json"
    config = json.loads(file.read_text())
    del config["reward_offset"]
    file.write_text(json.dumps(config))
    for name in ("ours", "theirs"):
        load_scalar_model(tmp_path / name)
    told = [line for line in caplog.messages if "read at the token that ends a response" in line]
    assert [line.partition(" is of")[0] for line in told] == [str(tmp_path / "theirs")]


def test_a_value_model_starts_at_zero_and_a_reward_head_depends_on_its_seed_alone(tmp_path):
    policy = tiny_policy("llama")
    export_policy(policy, tmp_path, policy.state_dict())
    zero = load_scalar_model(tmp_path, head="zero")
    assert (zero(IDS, POSITIONS) == 0).all()
    torch.manual_seed(5)
    first = load_scalar_model(tmp_path, head="reward", seed=3)
    state = torch.get_rng_state()
    second = load_scalar_model(tmp_path, head="reward", seed=3)
    other = load_scalar_model(tmp_path, head="reward", seed=4)
    assert torch.equal(torch.get_rng_state(), state), "loading must not draw from the run's state"
    assert torch.equal(first.head.weight, second.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)
    assert first.head.weight.std().item() == pytest.approx((HIDDEN + 1) ** -0.5, rel=0.4)


def test_weights_from_scratch_depend_on_the_seed_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    a, b, c = (logprobs(tiny_policy(seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), state)
