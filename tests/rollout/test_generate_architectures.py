"""The cached generator gives the tokens of plain decoding on every architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.rollout.generators.base import TransformersGenerator
from tests.builders.models import ANY, HIDDEN, prompt_batch
from tests.models.test_architectures import ARCHITECTURES, hub_model
from tests.rollout.plain_generation import ROWS, generated, without_cache

_FALCON = ANY | {
    "model_type": "falcon",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
# Attention of their own, not taken from transformers' table by name.
OWN_ATTENTION: dict[str, dict[str, Any]] = {
    "falcon": _FALCON | {"multi_query": True},
    "falcon_grouped": _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_alibi": _FALCON | {"alibi": True, "multi_query": False},
    "bloom": ANY | {"model_type": "bloom", "hidden_size": HIDDEN, "n_layer": 2, "n_head": 4},
    "gptj": ANY
    | {
        "model_type": "gptj",
        "n_embd": HIDDEN,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "rotary_dim": 4,
    },
}
ALL = ARCHITECTURES | OWN_ATTENTION


def plain_model(name: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**ALL[name])
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ALL)
def test_the_cached_engine_gives_the_tokens_of_plain_decoding_on_every_architecture(name):
    model = plain_model(name)
    prompts = prompt_batch(ROWS, width=10)
    assert len(set(map(len, ROWS))) > 4, "ragged, padded on the left"
    expected = without_cache(model, ROWS)
    assert max(map(len, expected.values())) > 8
    assert generated(model, prompts) == expected
    if name in OWN_ATTENTION:
        assert generated(model, prompts, engine=TransformersGenerator) == expected


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_a_loaded_policy_gives_the_same_tokens(tmp_path, name):
    folder = hub_model(tmp_path, name, **ALL[name])
    policy = load_policy(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with policy.generating() as model:
        assert generated(model, prompt_batch(ROWS, width=10)) == without_cache(plain, ROWS)
