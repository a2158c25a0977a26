from __future__ import annotations

import json
from unittest.mock import Mock

import httpx
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
from transformers import GenerationConfig

from rlhf_lightning.models.loading import loading_options
from rlhf_lightning.text import tokenizers
from rlhf_lightning.text.render import write_chat
from rlhf_lightning.text.tokenizers import (
    as_saved,
    check_same_tokenizer,
    load_tokenizer,
    stop_ids,
    with_template_arguments,
)
from rlhf_lightning.text.tokens import prompt_and_responses
from tests.builders.models import EOS, tiny_tokenizer
from tests.builders.tokenizers import build_tokenizer

COMMIT = "0123456789" * 4


def test_a_tokenizer_without_pad_pads_with_eos_on_the_left(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.pad_token_id == loaded.eos_token_id == EOS
    assert loaded.padding_side == "left"


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2"])
def test_a_tokenizer_of_its_own_is_read_as_it_was_saved_whatever_the_model_type(
    tmp_path, model_type
):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = load_tokenizer(tmp_path)
    assert loaded("w7 w11 w2")["input_ids"] == [7, 11, 2]
    of_a_reward_model = as_saved(str(tmp_path), loading_options(tmp_path))
    assert of_a_reward_model("w7 w11 w2")["input_ids"] == [7, 11, 2]
    check_same_tokenizer(loaded, tmp_path, fix="")


@pytest.mark.parametrize(
    ("eos", "expected"), [([7, 5], (EOS, 5, 7)), (9, (EOS, 9)), (None, (EOS,)), (EOS, (EOS,))]
)
def test_a_response_stops_at_the_tokenizers_eos_and_at_the_checkpoints_own(tmp_path, eos, expected):
    GenerationConfig(eos_token_id=eos).save_pretrained(tmp_path)
    assert stop_ids(tiny_tokenizer(), tmp_path) == expected


CONFIGS = {
    "its own file": ({"eos_token_id": 9}, {"eos_token_id": [7]}),
    "config.json alone": ({"eos_token_id": [EOS, 7]}, None),
    "the language model's part of config.json": ({"text_config": {"eos_token_id": 7}}, None),
}


def write_configs(folder, name):
    model, generation = CONFIGS[name]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | model))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))


def cache_model(folder, name):
    """Write the configs as the hub's client keeps a model that it has read."""
    cached = folder / "models--organisation--model"
    write_configs(cached / "snapshots" / COMMIT, name)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(COMMIT)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("place", ["folder", "hub"])
def test_a_checkpoint_names_its_stop_tokens_in_a_file_of_their_own_or_in_its_config(
    tmp_path, monkeypatch, name, place
):
    if place == "folder":
        write_configs(tmp_path / "model", name)
        assert stop_ids(tiny_tokenizer(), tmp_path / "model") == (EOS, 7)
        return
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cache_model(tmp_path, name)
    for revision in (None, COMMIT):
        assert stop_ids(tiny_tokenizer(), "organisation/model", revision=revision) == (EOS, 7)


def test_a_hub_that_refuses_to_say_when_to_stop_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cache_model(tmp_path, "config.json alone")
    answer = httpx.Response(404, request=httpx.Request("HEAD", "https://hub/x"))
    absent = RemoteEntryNotFoundError("404", response=answer)
    # What the hub's client raises at 403, at a time-out and without a network.
    refused = LocalEntryNotFoundError("An error happened while trying to locate the file")
    download = Mock(side_effect=[absent, refused])
    monkeypatch.setattr(tokenizers, "hf_hub_download", download)
    monkeypatch.setattr(tokenizers, "is_offline_mode", lambda: False)
    assert stop_ids(tiny_tokenizer(), "organisation/model") == (EOS, 7)
    with pytest.raises(ValueError, match="organisation/model"):
        stop_ids(tiny_tokenizer(), "organisation/model")


# What Qwen3's template does: a thought before the last answer, an empty one where none is given,
# and an empty one in front of what is to be generated if thinking is switched off.
THINKING = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\n' }}"
    "{%- if m['role'] == 'assistant' and loop.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{{- m['content'] + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
TURNS = ({"role": "user", "content": "two and two"},)
ANSWER = ({"role": "assistant", "content": "four"},)


def test_template_arguments_reach_the_prompt_and_the_answer_and_are_saved(tmp_path):
    build_tokenizer(template=THINKING).save_pretrained(tmp_path / "hub")
    thinking = load_tokenizer(tmp_path / "hub")
    assert write_chat(TURNS, thinking).endswith("assistant\n")
    assert "<think>" in thinking.decode(prompt_and_responses(TURNS, [ANSWER], thinking)[0].response)
    quiet = load_tokenizer(tmp_path / "hub", chat_template_arguments={"enable_thinking": False})
    assert write_chat(TURNS, quiet).endswith("assistant\n<think>\n\n</think>\n\n")
    assert (
        quiet.decode(prompt_and_responses(TURNS, [ANSWER], quiet)[0].response) == "four<|im_end|>"
    )
    quiet.save_pretrained(tmp_path / "sft")
    later = load_tokenizer(tmp_path / "sft")
    assert write_chat(TURNS, later) == write_chat(TURNS, quiet)
    again = load_tokenizer(tmp_path / "sft", chat_template_arguments={"enable_thinking": False})
    assert again.chat_template == later.chat_template


@pytest.mark.parametrize(
    ("value", "written"), [(True, "true"), (None, "none"), (3, "3"), ("it's", '"it\'s"')]
)
def test_template_arguments_are_written_as_the_template_language_has_them(value, written):
    tokenizer = build_tokenizer(template="{{ style }}")
    with_template_arguments(tokenizer, {"style": value})
    assert tokenizer.chat_template == f"{{%- set style = {written} %}}{{{{ style }}}}"
    rendered = {True: "True", None: "None", 3: "3"}.get(value, value)
    assert write_chat(TURNS, tokenizer) == rendered


def test_template_arguments_become_part_of_each_of_several_templates(tmp_path):
    templates = {"default": THINKING, "tool_use": "tools " + THINKING}
    build_tokenizer(template=templates).save_pretrained(tmp_path / "hub")
    quiet = load_tokenizer(tmp_path / "hub", chat_template_arguments={"enable_thinking": False})
    assert write_chat(TURNS, quiet).endswith("assistant\n<think>\n\n</think>\n\n")
    quiet.save_pretrained(tmp_path / "sft")
    later = load_tokenizer(tmp_path / "sft", chat_template_arguments={"enable_thinking": False})
    setting = "{%- set enable_thinking = false %}"
    assert later.chat_template == {name: setting + text for name, text in templates.items()}


def test_an_adapter_as_a_reward_model_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is an adapter on base.*merge it"):
        check_same_tokenizer(build_tokenizer(), tmp_path, fix="give another one")
    (tmp_path / "adapter_config.json").write_text('{"base_model')
    with pytest.raises(ValueError, match=r"adapter_config\.json is damaged"):
        check_same_tokenizer(build_tokenizer(), tmp_path, fix="give another one")
