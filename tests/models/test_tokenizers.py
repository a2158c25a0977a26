from __future__ import annotations

import json

import pytest
from transformers import GenerationConfig

from rlhf_lightning.data.tokens import answer_ids, render_chat
from rlhf_lightning.models.tokenizers import (
    check_same_tokenizer,
    load_tokenizer,
    stop_ids,
    with_template_arguments,
)
from rlhf_lightning.rollout.scorers.text_reward_model import load_fast_tokenizer
from tests.builders.models import EOS, PAD, tiny_tokenizer
from tests.builders.tokenizers import build_tokenizer


def test_a_tokenizer_without_pad_pads_with_eos_on_the_left(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.pad_token_id == loaded.eos_token_id == EOS
    assert loaded.padding_side == "left"


def test_a_pad_token_of_its_own_is_kept(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token_id == PAD


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma", "gpt2"])
def test_a_tokenizer_of_its_own_is_read_as_it_was_saved_whatever_the_model_type(
    tmp_path, model_type
):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = load_tokenizer(tmp_path)
    assert loaded("w7 w11 w2")["input_ids"] == [7, 11, 2]
    of_a_reward_model = load_fast_tokenizer(str(tmp_path), revision=None)
    assert of_a_reward_model("w7 w11 w2")["input_ids"] == [7, 11, 2]
    check_same_tokenizer(loaded, tmp_path, fix="")


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no EOS token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("eos", "expected"), [([7, 5], (EOS, 5, 7)), (9, (EOS, 9)), (None, (EOS,)), (EOS, (EOS,))]
)
def test_a_response_stops_at_the_tokenizers_eos_and_at_the_checkpoints_own(tmp_path, eos, expected):
    GenerationConfig(eos_token_id=eos).save_pretrained(tmp_path)
    assert stop_ids(tiny_tokenizer(), tmp_path) == expected


def test_the_stop_tokens_of_a_hub_checkpoint_are_found_without_a_folder(monkeypatch):
    asked = []

    def from_pretrained(source):
        asked.append(source)
        return GenerationConfig(eos_token_id=[7])

    monkeypatch.setattr(GenerationConfig, "from_pretrained", from_pretrained)
    assert stop_ids(tiny_tokenizer(), "organisation/model") == (EOS, 7)
    assert asked == ["organisation/model"]


def test_without_a_generation_config_only_the_tokenizers_eos_stops(tmp_path):
    assert stop_ids(tiny_tokenizer(), None) == (EOS,)
    assert stop_ids(tiny_tokenizer(), tmp_path) == (EOS,)


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
    assert render_chat(TURNS, thinking).endswith("assistant\n")
    assert "<think>" in thinking.decode(answer_ids(TURNS, ANSWER, thinking))
    quiet = load_tokenizer(tmp_path / "hub", chat_template_arguments={"enable_thinking": False})
    assert render_chat(TURNS, quiet).endswith("assistant\n<think>\n\n</think>\n\n")
    assert quiet.decode(answer_ids(TURNS, ANSWER, quiet)) == "four<|im_end|>"
    quiet.save_pretrained(tmp_path / "sft")
    later = load_tokenizer(tmp_path / "sft")
    assert render_chat(TURNS, later) == render_chat(TURNS, quiet)
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
    assert render_chat(TURNS, tokenizer) == rendered


def test_template_arguments_without_a_template_are_refused(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"chat_template_arguments=.* need a chat template"):
        load_tokenizer(tmp_path, chat_template_arguments={"enable_thinking": False})
