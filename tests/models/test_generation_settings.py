"""A model decodes as its base did, and what its base's settings contradict is not exported."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.modules.export import save_hf_model
from tests.builders.models import EOS, tiny_policy, tiny_tokenizer

PROMPT = torch.tensor([[5, 6, 7]])
# what generation_config.json says -> what the export's says of it
MENDED = {
    "greedy beside a temperature": ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {}),
    "samples at temperature 0": ({"do_sample": True, "temperature": 0.0, "top_k": 5}, {}),
    "beams of one": ({"num_beams": 1, "early_stopping": True, "length_penalty": 1.2}, {}),
    "beams": (
        {"num_beams": 3, "early_stopping": True, "length_penalty": 2.0},
        {"num_beams": 3, "early_stopping": True, "length_penalty": 2.0},
    ),
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
