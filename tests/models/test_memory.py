"""The formula of an update's memory, beside what one H100 held (torch 2.11, rows of 768 tokens)."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from rlhf_lightning.models.memory import activation_bytes, tokens_that_fit, update_bytes
from tests.builders.models import tiny_policy, tiny_scalar_model

QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
# Peaks with 16 and with 32 rows, of one forward and backward of the policy.
PEAKS = {
    "mixed": (30_482_576_896, 50_223_511_040),
    "bf16": (25_809_682_432, 42_853_679_104),
}

# Liger's norms and MLPs under autocast, 8 and 32 rows.
FUSED = (17.575799465179443, 38.131104946136475)  # GiB


@pytest.mark.parametrize("arithmetic", PEAKS)
def test_a_token_takes_what_it_took_on_a_gpu(arithmetic):
    few, many = PEAKS[arithmetic]
    expected = (many - few) / (16 * 768)
    found = activation_bytes(AutoConfig.for_model(**QWEN), arithmetic)
    assert found == pytest.approx(expected, rel=0.01)


def test_fused_kernels_keep_less():
    expected = (FUSED[1] - FUSED[0]) * 2**30 / (24 * 768)
    found = activation_bytes(AutoConfig.for_model(**QWEN), "mixed", fused={"norms", "MLPs"})
    # Each of five matrices had a cast of its own then; now two norms return bf16.
    assert found + 24 * 3 * 2 * 896 == pytest.approx(expected, rel=0.01)


def test_a_micro_batch_is_smaller_only_where_memory_is_short():
    policy, value = tiny_policy("llama"), tiny_scalar_model("llama")
    held = update_bytes([policy, value], "mixed")
    token = activation_bytes(policy.model.config, "mixed")
    plenty = tokens_that_fit([policy, value], 10 * held + 20_000 * token, "mixed")
    assert plenty == 16_384
    free = int((held + 1000.5 * token) / 0.9)
    assert tokens_that_fit([policy, value], free, "mixed") == 1000
    assert tokens_that_fit([policy, value], held // 2, "mixed") == 1, "a row is never cut"
