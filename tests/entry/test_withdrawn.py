"""Each setting, call and form that was withdrawn is refused with what is written instead."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rlhf_lightning
from rlhf_lightning.app.command_line import check_command_line
from rlhf_lightning.app.config.withdrawn import WITHDRAWN
from rlhf_lightning.data.sources.given import GivenRows
from rlhf_lightning.rollout.scorers.base import FunctionScorer
from rlhf_lightning.text.tokens import prompt_ids
from tests.builders.tokenizers import build_tokenizer

# What is called, and a part of the error: the line to write. A row a withdrawn call or form.
CALLS: list[tuple[str, Callable[[Path], object], str]] = [
    ("on_template_loss", lambda _: GivenRows([], on_template_loss="warn"), "on_template_loss"),
    ("<|im_end|> as text", lambda _: prompt_ids("<|im_end|>", build_tokenizer()), "rendered=true"),
    (
        "VllmServerGenerator",
        lambda _: rlhf_lightning.VllmServerGenerator,
        "VllmGenerator(..., pyth",
    ),
    (
        "rlhf-study",
        lambda _: __import__("rlhf_lightning.study").study.main(),
        "rlhf-train -m (seed=1,2 KEY=A,B, or +sweeps=NAME)",
    ),
    ("timeout_seconds", lambda _: FunctionScorer(len, timeout_seconds=1.0), "timeout_seconds"),
    ("lambda p, c", lambda _: FunctionScorer(lambda p, c: []), "def NAME(prompts, completions"),
    (
        "verl's form",
        lambda _: FunctionScorer(lambda solution_str=None, **k: []),
        "def NAME(prompts",
    ),
]


@pytest.mark.parametrize("gone", WITHDRAWN)
def test_a_withdrawn_setting_is_refused_with_its_replacement(gone, monkeypatch, capsys):
    word = gone.replace("*", "any") if "=" in gone else f"{gone.replace('*', 'any')}=1"
    monkeypatch.setattr(sys, "argv", ["rlhf-train", "+experiment=ppo", word])
    with pytest.raises(SystemExit) as caught:
        check_command_line("train")
    assert caught.value.code == 2
    assert f"{word} was withdrawn: {WITHDRAWN[gone]}" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "call", "instead"), CALLS, ids=[name for name, *_ in CALLS])
def test_a_withdrawn_call_or_form_is_refused_with_its_replacement(name, call, instead, tmp_path):
    with pytest.raises((TypeError, ValueError, AttributeError, SystemExit)) as caught:
        call(tmp_path)
    assert instead in str(caught.value)
