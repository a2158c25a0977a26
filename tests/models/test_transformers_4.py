"""An export is read by transformers 4 as by transformers 5: the same logits and the same ids."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlhf_lightning.models.export import name_old_tokenizer, with_old_keys, write_json
from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.text.tokenizers import load_tokenizer
from tests.builders.models import EOS, LLAMA_LIKE, config_fields, tiny_tokenizer
from tests.builders.tokenizers import CHATML, build_tokenizer

OLD = ("transformers==4.57.6", "tokenizers==0.22.2", "huggingface_hub==0.36.0")
IDS = torch.arange(2, 42)[None]
THETA = {"rope_type": "default", "rope_theta": 777.0}
HALF = THETA | {"partial_rotary_factor": 0.5}
LLAMA_3 = THETA | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = THETA | {"rope_type": "linear", "factor": 4.0}
YARN = LINEAR | {"rope_type": "yarn", "original_max_position_embeddings": 16}
LONG = YARN | {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
BY_LAYER = {"full_attention": LINEAR, "sliding_attention": THETA | {"rope_theta": 99.0}}
_SIZES = LLAMA_LIKE | {"num_attention_heads": 4, "num_key_value_heads": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def sized(model_type: str, rope: dict[str, Any], **more: Any) -> dict[str, Any]:
    return _SIZES | {"model_type": model_type, "rope_parameters": rope} | more


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": sized("llama", LLAMA_3),
    "qwen2": sized("qwen2", YARN, tie_word_embeddings=True),
    "gemma2": sized("gemma2", THETA, head_dim=16, sliding_window=8),
    "gemma3_text": sized("gemma3_text", BY_LAYER, head_dim=16, sliding_window=8)
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "phi3": sized("phi3", LONG, original_max_position_embeddings=16),
    "gpt_neox": sized("gpt_neox", HALF),
    "gpt2": config_fields("gpt2"),
    "qwen2_moe": sized("qwen2_moe", THETA, **_EXPERTS, shared_expert_intermediate_size=48),
    "qwen3_moe": sized("qwen3_moe", THETA, **_EXPERTS, head_dim=8),
    "granite": sized("granite", THETA, logits_scaling=2.0, embedding_multiplier=2.0),
    "falcon": sized("falcon", THETA, num_kv_heads=2, new_decoder_architecture=True),
    "cohere": sized("cohere", THETA),
    "gpt_oss": sized("gpt_oss", YARN, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    | {"sliding_window": 8},
}
SCALED_LOGITS = ("granite", "cohere")  # not trained here, so their folders are completed alone
READ = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
found = {"version": transformers.__version__}
for name in sys.argv[2:]:
    folder = f"{sys.argv[1]}/{name}"
    kind = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    model = kind.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.arange(2, 42)[None]).logits
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found[name] = [logits.flatten().tolist(), tokenizer("w5 w6 <eos>")["input_ids"]]
print(json.dumps(found))
"""


def published(folder: Path, name: str, **changes: Any) -> Path:
    """Write a random model as somebody else would publish it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(FAMILIES[name] | changes)))
    model.generation_config = GenerationConfig(eos_token_id=EOS)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def exported(source: Path, name: str, folder: Path) -> Path:
    if name in SCALED_LOGITS:
        config = AutoConfig.from_pretrained(source)
        content = json.loads((source / "config.json").read_text())
        folder.symlink_to(source)
        write_json(source / "config.json", with_old_keys(content, config))
        name_old_tokenizer(source)
        return folder
    model = load_scalar_model(source, head="reward") if name == "reward" else load_policy(source)
    save_hf_model(model, load_tokenizer(source), folder, model.state_dict(), stop_ids=[EOS])
    return folder


@pytest.fixture(scope="module")
def transformers_4() -> Path:
    """A folder for PYTHONPATH, kept between sessions: loaded from the package index once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "rlhf_lightning"
    folder = cache / OLD[0].replace("==", "-")
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        new = cache / f".new-{os.getpid()}"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(new)]
        done = subprocess.run([*pip, *OLD], capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.skip(f"pip cannot load {OLD[0]}: {done.stderr.strip().splitlines()[-1]}")
        new.rename(folder)
    return folder


@pytest.mark.slow
def test_both_versions_of_transformers_read_the_same_logits_of_every_family(
    transformers_4, tmp_path
):
    expected = {}
    for name in FAMILIES:
        source = published(tmp_path / "source" / name, name)
        folder = exported(source, name, tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        expected[name] = model.eval()(IDS).logits.detach()
    exported(tmp_path / "source/llama", "reward", tmp_path / "reward")
    command = [sys.executable, "-c", READ, str(tmp_path), *FAMILIES, "reward"]
    environment = os.environ | {"PYTHONPATH": str(transformers_4)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("version").startswith("4.")
    assert found.pop("reward")[1] == [5, 6, EOS]
    for name, (logits, ids) in found.items():
        theirs = torch.tensor(logits).view_as(expected[name])
        torch.testing.assert_close(theirs, expected[name], rtol=0, atol=1e-5, msg=name)
        assert ids == [5, 6, EOS], name


def old_config(tmp_path: Path, name: str, **changes: Any) -> dict[str, Any]:
    folder = exported(published(tmp_path / "source", name, **changes), name, tmp_path / "export")
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    again = AutoConfig.from_pretrained(folder).rope_parameters
    before = AutoConfig.from_pretrained(tmp_path / "source").rope_parameters
    assert {k: v for k, v in again.items() if k != "type"} == before
    return content


def test_an_old_scaling_that_todays_transformers_would_read_otherwise_is_left_out(tmp_path):
    # Phi 3 of transformers 4 has no place for a factor of attention.
    content = old_config(tmp_path, "phi3", rope_parameters=LONG | {"attention_factor": 1.5})
    assert "rope_scaling" not in content
    assert content["rope_parameters"]["attention_factor"] == 1.5


def test_the_tokenizers_class_and_special_tokens_have_the_names_of_transformers_4(tmp_path):
    tokenizer = build_tokenizer(template=CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    tokenizer.save_pretrained(tmp_path)
    name_old_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert content["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert content["additional_special_tokens"] == ["<tool>"]
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "a <tool> b"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.chat_template == tokenizer.chat_template
    assert again.all_special_tokens == tokenizer.all_special_tokens
