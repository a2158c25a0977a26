"""Thoughts of responses, which reward models, judges and raters are not shown."""

from __future__ import annotations

import pytest

from rlhf_lightning.text.thoughts import shown


@pytest.mark.parametrize(
    ("prompt", "response", "left"),
    [
        ("Q?", "<think>\nhm\n</think>\n\nYes.", ("Q?", "Yes.")),
        ("Q?<think>\n", "hm\n</think>\n\nYes.", ("Q?", "Yes.")),
        ("", "hm</think>Yes.", ("", "Yes.")),
        ("Q?", "[THINK]hm[/THINK]Yes.", ("Q?", "Yes.")),
        ("Q?", "<|channel|>analysis<|message|>hm<|channel|>final<|message|>Yes.", ("Q?", "Yes.")),
        ("Q?", "<think>hm", ("Q?", "")),
        ("Q?<think>", "hm", ("Q?", "")),
        ("Q?<think>\n\n</think>\n\n", "Yes.", ("Q?<think>\n\n</think>\n\n", "Yes.")),
        ("Q?", " Yes. ", ("Q?", " Yes. ")),
        ("Q?", "Write <think> and </think> around it.", None),
    ],
)
def test_a_response_is_shown_behind_its_thoughts_unless_they_are_kept(prompt, response, left):
    assert shown(prompt, response, "drop", "a") == (left or (prompt, response))
    assert shown(prompt, response, "keep", "a") == (prompt, response)
