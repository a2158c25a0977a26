"""Messages that lost their type in the exports of Label Studio."""

from __future__ import annotations

import json

from rlhf_lightning.data.errors import Location
from rlhf_lightning.preferences.formats.tools import read_tool

PROMPT = [{"role": "user", "content": "How does one look after tea?"}]
ANSWERS = {"answer1": "Keep it dry.", "answer2": 'It\'s "odd".'}


def test_prompts_and_answers_that_are_json_are_messages():
    said = {
        key: json.dumps([{"role": "assistant", "content": text}]) for key, text in ANSWERS.items()
    }
    row = {"data": {"prompt": json.dumps(PROMPT), **said}}
    (pair,), _ = read_tool(
        "label_studio", [(Location("f", 1), row)], source="f", now="2026-01-01T00:00:00Z"
    )
    assert list(pair.prompt) == PROMPT
    assert [pair.first, pair.second] == list(ANSWERS.values())
