"""PPO with a reward model whose export has one token more than the policy's tokenizer."""

from __future__ import annotations

import pytest
import torch

from rlhf_lightning.models.factory import load_scalar_model
from rlhf_lightning.models.ppo_models import ppo_models
from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.rollout.scorers.base import RewardModelScorer
from rlhf_lightning.text.tokenizers import check_same_tokenizer, load_tokenizer
from tests.builders.models import (
    EOS,
    VOCABULARY,
    flat_parameters,
    tiny_policy,
    tiny_scalar_model,
    tiny_tokenizer,
)
from tests.builders.stages import fit, prompts, tiny_module


@pytest.mark.parametrize("model_type", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_the_pad_token_that_the_export_added_changes_nothing_in_ppo(model_type, tmp_path):
    tokenizer = tiny_tokenizer(pad_is_eos=True)
    policy, reward = tiny_policy(model_type), tiny_scalar_model(model_type, bias=0.2)
    save_hf_model(policy, tokenizer, tmp_path / "sft", policy.state_dict(), stop_ids=[EOS])
    save_hf_model(reward, tokenizer, tmp_path / "reward", reward.state_dict(), stop_ids=[EOS])
    assert load_scalar_model(tmp_path / "reward").trunk.config.vocab_size == VOCABULARY + 1
    check_same_tokenizer(tokenizer, tmp_path / "reward", fix="")

    def trained(load_reward):
        models = ppo_models(tmp_path / "sft", tmp_path / "reward")
        module = tiny_module(
            models=lambda: models,
            scorer=RewardModelScorer(load_reward),
            tokenizer=load_tokenizer(tmp_path / "sft"),
            pad=EOS,
        )
        fit(module, [prompts(i, pad=EOS) for i in range(2)])
        return module

    exported = trained(lambda: load_scalar_model(tmp_path / "reward"))
    original = trained(lambda: tiny_scalar_model(model_type, bias=0.2))
    assert torch.equal(exported.rollouts[0].scores, original.rollouts[0].scores)
    assert exported.steps[0]["ppo/approx_kl"] == exported.steps[0]["ppo/clipfrac"] == 0
    for part in ("policy", "value"):
        ours, theirs = (flat_parameters(getattr(m, part)) for m in (exported, original))
        assert torch.equal(ours, theirs), part
    added = exported.value.trunk.get_input_embeddings().weight[VOCABULARY]
    assert (added == 0).all(), "the row of the added token was read"
