from __future__ import annotations

import pytest

from rlhf_lightning.runs.public_config import REMOVED, name_secrets, public_config, public_words


def test_folders_secrets_and_who_is_told_are_left_out():
    config = {
        "seed": 1,
        "paths": {"outputs": "/home/me/outputs"},
        "logger": {"project": "p"},
        "scorer": {"url": "http://me:pw@host/v1", "headers": {"X": "a"}, "OPENAI_API_KEY": "b"},
        "dataset": {"path": "/home/me/pairs.jsonl", "rows": ["/a/b/c", 3, None, True]},
        "a": "hunter2",
        "c": [""],
        "password": None,
    }
    written = config | {"a": "${oc.env:MINE}", "c": ["${oc.env:NAME,}"]}
    assert public_config(config, written) == {
        "seed": 1,
        "scorer": {"url": "http://host/v1", "headers": REMOVED, "OPENAI_API_KEY": REMOVED},
        "dataset": {"path": ".../pairs.jsonl", "rows": [".../c", 3, None, True]},
        "a": "${oc.env:MINE}",
        "c": [""],
        "password": None,
    }


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("+x.api_key=abc", f"+x.api_key={REMOVED}"),
        ("scorer.headers.X=abc", f"scorer.headers.X={REMOVED}"),
        ("scorer.url=http://me:pw@host/v1", "scorer.url=http://host/v1"),
        ("data.also=[/home/me/a,/home/me/b]", "data.also=[.../a,.../b]"),
        ("scorer.function=/home/me/rewards.py:score", "scorer.function=.../rewards.py:score"),
        ("model.source=HuggingFaceTB/SmolLM2-135M", "model.source=HuggingFaceTB/SmolLM2-135M"),
        ("+experiment=ppo", "+experiment=ppo"),
    ],
)
def test_words_of_a_command_line_are_shown_without_secrets_and_folders(word, shown):
    assert public_words([word]) == [shown]
    assert name_secrets([word]) == (REMOVED in shown)
