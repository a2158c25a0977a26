"""Messages that lost their type in the exports of labelling tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_lightning.data.errors import Location
from rlhf_lightning.preferences.formats.tools import read_tool

PROMPT = [{"role": "user", "content": "How does one look after tea?"}]
ANSWERS = {"answer1": "Keep it dry.", "answer2": 'It\'s "odd".'}


@pytest.mark.parametrize("dump", [json.dumps, repr])
@pytest.mark.parametrize(
    ("tool", "texts"), [("argilla", "fields"), ("label_studio", "data")]
)  # fmt: skip
def test_prompts_and_answers_that_were_printed_are_messages(tool: Any, texts, dump):
    said = {key: dump([{"role": "assistant", "content": text}]) for key, text in ANSWERS.items()}
    row = {texts: {"prompt": dump(PROMPT), **said}}
    (pair,), _ = read_tool(tool, [(Location("f", 1), row)], source="f", now="2026-01-01T00:00:00Z")
    assert list(pair.prompt) == PROMPT
    assert [pair.first, pair.second] == list(ANSWERS.values())
