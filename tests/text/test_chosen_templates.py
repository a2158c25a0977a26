"""`model.chat_template`: a template of a file, of another model, or one of ours."""

import pytest
from transformers import AutoTokenizer

from rlhf_lightning.text.render import render_chat
from rlhf_lightning.text.tokenizers import load_tokenizer, read_template
from tests.builders.tokenizers import build_tokenizer

USER = {"role": "user", "content": "What is it?"}
ANSWER = {"role": "assistant", "content": "Sunny."}
CALL = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"town": "Ulm"}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "Looking.", "reasoning_content": "old", "tool_calls": [CALL]},
    {"role": "tool", "content": "12", "name": "f", "tool_call_id": "c1"},
    {**ANSWER, "reasoning_content": "new"},
]


@pytest.fixture
def folder(tmp_path):
    build_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["chatml", "no_roles", "thoughts_and_tools"])
def test_our_templates_keep_the_prompt_as_the_start_of_the_whole(folder, name):
    tokenizer = load_tokenizer(folder, chat_template=name)
    prompt = render_chat((TALK[0], USER), tokenizer)
    whole = render_chat((TALK[0], USER, ANSWER), tokenizer, add_generation_prompt=False)
    assert whole.startswith(prompt)
    assert whole.removeprefix(prompt).removesuffix("\n") == "Sunny.<|im_end|>"


def test_thoughts_calls_results_and_documents_of_all_turns_are_written(folder):
    tokenizer = load_tokenizer(folder, chat_template="thoughts_and_tools")
    variables = {"tools": [{"name": "f"}], "documents": [{"text": "PAGE"}]}
    text = render_chat(TALK, tokenizer, add_generation_prompt=False, variables=variables)
    said = ["Be brief.", '"name": "f"', "PAGE", "What", "old", "Ulm", "c1", "12", "new", "Sunny."]
    ends = [text.index(each) for each in said]
    assert ends == sorted(ends)
    assert text.count("Be brief.") == 1


def test_a_template_of_a_file_or_a_model_is_exported_with_the_tokenizer(folder, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    load_tokenizer(folder, chat_template=str(file)).save_pretrained(tmp_path / "out")
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported.apply_chat_template([USER], tokenize=False) == "[What is it?]"
    assert read_template(str(tmp_path / "out")) == file.read_text()
    assert read_template(file.read_text()) == file.read_text()


def test_a_template_that_is_nowhere_is_an_error_that_names_ours(folder):
    with pytest.raises(ValueError, match=r"model\.chat_template='chatlm'.*chatml"):
        load_tokenizer(folder, chat_template="chatlm")


def test_modules_take_and_keep_a_template(tmp_path):
    from rlhf_lightning import DPOModule, SFTModule
    from tests.builders.models import tiny_policy, tiny_tokenizer

    policy = tmp_path / "policy"
    tiny_policy("llama").model.save_pretrained(policy)
    tiny_tokenizer().save_pretrained(policy)
    for cls in (SFTModule, DPOModule):
        module = cls.from_pretrained(policy, chat_template="no_roles")
        assert module.tokenizer.chat_template == read_template("no_roles")
        assert module.hparams["chat_template"] == read_template("no_roles")
