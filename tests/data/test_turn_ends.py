"""Where an answer ends: at the token where a rollout stops, in every stage."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tokenizers import AddedToken

from rlhf_lightning.data.records import DemonstrationRecord, PreferenceRecord, PromptRecord
from rlhf_lightning.evaluation.benchmarks import written_responses
from rlhf_lightning.text.render import write_chat
from rlhf_lightning.text.tokenizers import check_same_tokenizer, classifier_tokenizer, stop_ids
from tests.builders.encoding import encode_all, encode_one
from tests.builders.tokenizers import FAMILIES, family_tokenizer

ASKED = ({"role": "user", "content": "why the end?"},)


def said(content):
    return ({"role": "assistant", "content": content},)


@pytest.mark.parametrize("family", ["chatml", "llama 3"])
def test_every_stage_ends_an_answer_at_its_first_stop_token(family):
    tokenizer = family_tokenizer(family)
    end = tokenizer.convert_tokens_to_ids(FAMILIES[family][-1])
    stops = stop_ids(tokenizer, None)
    shown = encode_one(DemonstrationRecord(ASKED, said("so")), tokenizer, max_length=500)
    pair = encode_one(PreferenceRecord(ASKED, said("so"), said("no")), tokenizer, max_length=500)
    written = written_responses(
        [PromptRecord(ASKED)],
        [said("so")],
        tokenizer,
        max_prompt_length=500,
        batch_size=1,
        device=torch.device("cpu"),
        scorer=None,
    )
    answers = [
        shown.input_ids[shown.loss_mask].tolist(),
        pair.chosen_input_ids[pair.prompt_length :].tolist(),
        written.token_ids[0],
    ]
    wanted = [*tokenizer("so", add_special_tokens=False)["input_ids"], end]
    assert answers == [wanted] * 3
    assert pair.rejected_input_ids[-1] == end
    assert written.completions == ["so"]
    for ids in answers:
        assert [i for i, token in enumerate(ids) if token in stops] == [len(ids) - 1]
    (together,), _ = encode_all([DemonstrationRecord(ASKED, said("so"))], tokenizer, max_length=500)
    assert together.input_ids.tolist() == shown.input_ids.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_was_rendered_ends_where_the_conversation_does(family):
    tokenizer = family_tokenizer(family)
    chat = encode_one(DemonstrationRecord(ASKED, said("so")), tokenizer, max_length=500)
    prompt = write_chat(ASKED, tokenizer)
    response = write_chat((*ASKED, *said("so")), tokenizer, add_generation_prompt=False)
    text = DemonstrationRecord(prompt, response.removeprefix(prompt), rendered=True)
    (row,), _ = encode_all([text], tokenizer, max_length=500)
    assert tokenizer.decode(row.input_ids[row.loss_mask]) == f"so{FAMILIES[family][-1]}"
    assert row.input_ids.tolist() == chat.input_ids.tolist()
    two = replace(text, completion=f"{text.completion}more")
    ended = encode_one(two, tokenizer, max_length=500)
    assert tokenizer.decode(ended.input_ids).endswith(f"more{tokenizer.eos_token}")


def test_a_reward_model_whose_template_ends_answers_elsewhere_is_refused(tmp_path):
    tokenizer = family_tokenizer("gemma")
    other = family_tokenizer("gemma")
    other.chat_template = other.chat_template.replace("<end_of_turn>", "<eos>")
    other.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"responses with '<eos>', the policy with .* '<end_of"):
        check_same_tokenizer(tokenizer, tmp_path, fix="export it again")


def test_a_reward_model_that_writes_other_text_around_conversations_is_named(tmp_path, caplog):
    tokenizer = family_tokenizer("chatml")
    classifier_tokenizer(tokenizer).save_pretrained(tmp_path / "exported")
    check_same_tokenizer(tokenizer, tmp_path / "exported", fix="")
    assert "chat template" not in caplog.text
    other = family_tokenizer("chatml")
    other.chat_template = "You are kind.<|im_end|>" + other.chat_template
    other.save_pretrained(tmp_path / "other")
    check_same_tokenizer(tokenizer, tmp_path / "other", fix="")
    assert "other has another chat template than the policy" in caplog.text


def test_a_call_that_ends_with_another_token_is_learnt_up_to_it(make_tokenizer):
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{{ m.tool_calls[0].function.name"
        " }}{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}{{ m.content }}"
        "<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = make_tokenizer(template=template)
    tokenizer.add_tokens([AddedToken("<|call|>", special=True, normalized=False)], True)
    call = {"type": "function", "function": {"name": "f", "arguments": {"town": "Ulm"}}}
    answer = ({"role": "assistant", "content": "", "tool_calls": [call]},)
    row = encode_one(DemonstrationRecord(ASKED, answer), tokenizer, max_length=500)
    assert row.input_ids[-1] == tokenizer.convert_tokens_to_ids("<|call|>")
    plain = encode_one(DemonstrationRecord(ASKED, said("so")), tokenizer, max_length=500)
    assert plain.input_ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
