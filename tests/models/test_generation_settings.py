"""A model decodes as its base did, whatever contradicts itself in the base's settings."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.modules.export import save_hf_model
from tests.builders.models import EOS, tiny_policy, tiny_tokenizer

PROMPT = torch.tensor([[5, 6, 7]])
# what generation_config.json says -> what the export's says of it
MENDED = {
    "greedy beside a temperature": ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {}),
    "greedy beside top-h": ({"do_sample": False, "top_h": 0.4, "epsilon_cutoff": 3e-4}, {}),
    "greedy by its temperature": ({"do_sample": False, "temperature": 0.0}, {}),
    "samples at temperature 0": ({"do_sample": True, "temperature": 0.0, "top_k": 5}, {}),
    "says nothing but temperature 0": ({"temperature": 0}, {}),
    "beams of one": ({"num_beams": 1, "early_stopping": True, "length_penalty": 1.2}, {}),
    "scores": ({"output_scores": True, "return_dict_in_generate": False}, {}),
    "logits": ({"output_logits": True}, {}),
    "a cache that is off": ({"use_cache": False, "cache_implementation": "static"}, {}),
    "beams": (
        {"num_beams": 3, "early_stopping": True, "length_penalty": 2.0},
        {"num_beams": 3, "early_stopping": True, "length_penalty": 2.0},
    ),
    "does not say whether to sample": ({"temperature": 0.6, "min_p": 0.1, "top_k": 7}, {}),
    "samples": (
        {"do_sample": True, "temperature": 0.6, "min_p": 0.1},
        {"temperature": 0.6, "min_p": 0.1},
    ),
}


def with_settings(folder, settings):
    model = tiny_policy("llama").model
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("case", MENDED)
def test_settings_that_contradict_each_other_are_mended_and_saved(case, tmp_path):
    given, expected = MENDED[case]
    policy = load_policy(with_settings(tmp_path / "a", given))
    save_hf_model(policy, tiny_tokenizer(), tmp_path / "b", policy.state_dict(), stop_ids=[EOS])
    written = GenerationConfig.from_pretrained(tmp_path / "b")
    dropped = given.keys() - expected.keys() - {"do_sample", "num_beams", "use_cache"}
    kept = {name: getattr(written, name) for name in expected}
    assert kept == expected
    assert all(not getattr(written, name) for name in dropped)
    assert (written.do_sample is True) is (case == "samples")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    first, second = (model.generate(PROMPT, max_new_tokens=8) for _ in range(2))
    assert case == "samples" or torch.equal(first, second)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"suppress_tokens": [EOS], "forced_eos_token_id": EOS}, "forced_eos_token_id"),
        ({"num_return_sequences": 4}, "num_return_sequences"),
        ({"cache_implementation": "nosuch"}, "cache_implementation"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"repetition_penalty": 2}, "repetition_penalty=2"),
        ({"do_sample": True, "temperature": -0.5}, "temperature=-0.5"),
        ({"do_sample": True, "temperature": 1e-320}, "temperature=1e-320"),
        ({"do_sample": True, "top_k": -1, "temperature": 0.5}, "top_k=-1"),
        ({"do_sample": True, "top_p": -0.1}, "top_p=-0.1"),
        ({"num_beams": 0}, "num_beams=0"),
        ({"num_beams": -2}, "num_beams=-2"),
        ({"no_repeat_ngram_size": 2.5}, "no_repeat_ngram_size=2.5"),
        ({"bad_words_ids": [[500_000]]}, "bad_words_ids"),
        ({"exponential_decay_length_penalty": [1]}, "exponential_decay_length_penalty"),
        ({"forced_eos_token_id": 500_000, "max_length": 9}, "forced_eos_token_id"),
    ],
)
def test_settings_that_cannot_be_exported_or_used_are_refused_before_training(
    settings, key, tmp_path
):
    folder = with_settings(tmp_path, settings)
    for lora in (None, LoraHparams(r=2, alpha=2)):
        with pytest.raises(ValueError, match=key):
            load_policy(folder, lora=lora)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"compile_config": {"fullgraph": True}}, "compile_config"),
        ({"cache_implementation": "nosuch"}, "nosuch"),
        ([1], "mapping"),
    ],
)
def test_settings_that_transformers_refuses_are_named_by_their_file(settings, reason, tmp_path):
    folder = with_settings(tmp_path, settings)
    for lora in (None, LoraHparams(r=2, alpha=2)):
        with pytest.raises(ValueError, match=rf"{reason}.*Correct generation_config\.json"):
            load_policy(folder, lora=lora)


def test_a_trial_of_the_settings_draws_no_random_number(tmp_path):
    folder = with_settings(tmp_path, {"do_sample": True, "top_k": 5})
    torch.manual_seed(1)
    load_policy(folder)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))
