"""Each setting and name that was withdrawn is refused with what is written instead."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

import rlhf_lightning
from rlhf_lightning.app.command_line import check_command_line
from rlhf_lightning.app.config.errors import WITHDRAWN, withdrawn

# What is called, and a part of the error: the line to write. Withdrawn forms of rows, files and
# reward functions are in the tests of those that read them.
CALLS: list[tuple[str, Callable[[], object], str]] = [
    ("LabelledTextSource", lambda: rlhf_lightning.LabelledTextSource, "examples.datasets"),
    ("TranscriptSource", lambda: rlhf_lightning.TranscriptSource, "HubSource(NAME)"),
    ("VllmServerGenerator", lambda: rlhf_lightning.VllmServerGenerator, "VllmGenerator(..., pyth"),
    (
        "rlhf-study",
        lambda: __import__("rlhf_lightning.study").study.main(),
        "rlhf-train -m (seed=1,2 KEY=A,B, or +sweeps=NAME)",
    ),
]


def word_of(gone: str) -> str:
    return gone.replace("*", "any") if "=" in gone else f"{gone.replace('*', 'any')}=1"


def test_a_withdrawn_setting_is_refused_with_its_replacement():
    for gone, instead in WITHDRAWN.items():
        word = word_of(gone)
        assert withdrawn(["+experiment=ppo", word]) == f"{word} was withdrawn: {instead}"


def test_the_command_line_refuses_it_before_anything_else(monkeypatch, capsys):
    word = word_of(next(iter(WITHDRAWN)))
    monkeypatch.setattr(sys, "argv", ["rlhf-train", "+experiment=ppo", word])
    with pytest.raises(SystemExit) as caught:
        check_command_line("train")
    assert caught.value.code == 2
    assert f"{word} was withdrawn: " in capsys.readouterr().err


@pytest.mark.parametrize(("name", "call", "instead"), CALLS, ids=[name for name, *_ in CALLS])
def test_a_withdrawn_name_is_refused_with_its_replacement(name, call, instead):
    with pytest.raises((AttributeError, SystemExit)) as caught:
        call()
    assert instead in str(caught.value)
