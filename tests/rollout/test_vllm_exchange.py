"""What vLLM is sent, and what it may answer."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_lightning.rollout.generators.vllm import Request, check_responses, named_weights
from tests.builders.models import EOS, prompt_rows

REQUEST = Request(
    prompt_rows([3, 8]), [1, 2], {"temperature": 1.0, "max_new_tokens": 8, "stop_ids": [EOS]}
)
SOUND = ([5, EOS], [-1.0, float("nan")])


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("gpt_neox", {}),
        ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 8}),
    ],
)
def test_weights_are_sent_under_the_names_of_the_checkpoint(tmp_path, kind, sizes, loaded):
    common = {
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 1},
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **common, **sizes))
    model.save_pretrained(tmp_path)
    if loaded:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    kept = load_file(tmp_path / "model.safetensors")
    sent = dict(named_weights(model))
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert sent.keys() == kept.keys() | tied
    for name, weight in kept.items():
        assert torch.equal(sent[name], weight), name


@pytest.mark.parametrize("tokens", [[5, EOS, 7, EOS], [5] * 9, [5] * 9 + [EOS], [5, 6], []])
def test_a_response_that_does_not_end_where_it_has_to_ends_the_run(tokens):
    check_responses([SOUND, ([5] * 8, [1e-6] * 8)], REQUEST)
    cut = rf"response to row 1 has {len(tokens)} tokens"
    with pytest.raises(RuntimeError, match=cut):
        check_responses([SOUND, (tokens, [-1.0] * len(tokens))], REQUEST)


def test_a_log_probability_above_0_ends_the_run_in_whichever_row_it_is():
    odd = ([5] * 8, [-1.0] * 7 + [3.0])
    with pytest.raises(RuntimeError, match="row 1 has a log-probability of 3,"):
        check_responses([SOUND, odd], REQUEST)
