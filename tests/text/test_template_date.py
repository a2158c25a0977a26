"""Chat templates that write the date: the same tokens on every day."""

from __future__ import annotations

from datetime import date

import pytest

from rlhf_lightning.models.loading import loading_options
from rlhf_lightning.text.render import DATE, write_chat
from rlhf_lightning.text.tokenizers import as_saved, load_tokenizer
from tests.builders.tokenizers import CHATML, build_tokenizer

# As Llama 3.2 writes it.
LLAMA = (
    "{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
    '        {%- set date_string = strftime_now("%d %b %Y") %}\n    {%- else %}\n'
    '        {%- set date_string = "26 Jul 2024" %}\n    {%- endif %}\n{%- endif %}\n'
    "{{- 'Today Date: ' + date_string + '\\n' }}" + CHATML
)
# As SmolLM3 and gpt-oss write it.
DIRECT = (
    "{%- set day = strftime_now('%d-%B-%Y') -%}{{ day }} {{ strftime_now(\"%-d %Y\") }} " + CHATML
)
ASKED = ({"role": "user", "content": "why?"},)


def saved(folder, template):
    build_tokenizer(template=template).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("template", "front"),
    [(LLAMA, "Today Date: 26 Jul 2024\n"), (DIRECT, "26-July-2024 26 2024 ")],
)
def test_a_template_that_writes_the_date_writes_one_that_stays(tmp_path, template, front):
    assert str(date.today().year) in write_chat(ASKED, build_tokenizer(template=template))
    for load in (load_tokenizer, lambda folder: as_saved(str(folder), loading_options(folder))):
        tokenizer = load(saved(tmp_path / "hub", template))
        assert write_chat(ASKED, tokenizer).startswith(front + "<|im_start|>")


@pytest.mark.parametrize(
    ("template", "front"),
    [(LLAMA, "Today Date: 3 May 2025\n"), (DIRECT, "03-May-2025 3 2025 ")],
)
def test_the_date_may_be_another_and_stays_with_the_exported_tokenizer(tmp_path, template, front):
    arguments = {"date_string": "3 May 2025", "enable_thinking": False}
    tokenizer = load_tokenizer(saved(tmp_path / "hub", template), chat_template_arguments=arguments)
    tokenizer.save_pretrained(tmp_path / "sft")
    for given in (None, arguments, {"enable_thinking": False}):
        later = load_tokenizer(tmp_path / "sft", chat_template_arguments=given)
        assert write_chat(ASKED, later).startswith(front)
        assert later.chat_template == tokenizer.chat_template
    with pytest.raises(ValueError, match=r'"3 May 2025" into the chat template: give the same'):
        load_tokenizer(tmp_path / "sft", chat_template_arguments={"date_string": DATE})
    with pytest.raises(ValueError, match="enable_thinking=True, but the stage before wrote false"):
        load_tokenizer(tmp_path / "sft", chat_template_arguments={"enable_thinking": True})
