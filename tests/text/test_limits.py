"""A template that does not end is stopped by name, and the next one is rendered."""

from __future__ import annotations

import time

import pytest

from rlhf_lightning.text import limits
from rlhf_lightning.text.limits import TemplateLimitError
from rlhf_lightning.text.templates import render_chat
from rlhf_lightning.text.turn_end import turn_end
from tests.builders.tokenizers import CHATML, build_tokenizer

MESSAGES = ({"role": "user", "content": "a"},)
RANGE = "range(99999)"
ENDLESS = {
    "loops": f"{{% for a in {RANGE} %}}{{% for b in {RANGE} %}}{{% endfor %}}{{% endfor %}}",
    "grows": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "grows a list": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "range": "{% for i in range(10 ** 12) %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a long text": "{{ 'a' * 10 ** 15 }}",
}


class Endless:
    """Loops in its finalizer, where Python prints an exception and drops it."""

    def __del__(self):
        while True:
            pass


def looped_behind_a_finalizer(seconds):
    end = time.monotonic() + seconds
    with limits.limited():
        Endless()
        while time.monotonic() < end:
            pass


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_without_an_end_is_stopped_by_name(template, monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.5)
    monkeypatch.setattr(limits, "GIBIBYTES", 0.05)
    tokenizer = build_tokenizer(template=ENDLESS[template])
    begun = time.monotonic()
    for render in (lambda: render_chat(MESSAGES, tokenizer), lambda: turn_end(tokenizer)):
        with pytest.raises(TemplateLimitError, match="chat template did not end"):
            render()
    assert time.monotonic() - begun < 60  # to get memory takes long on some virtual machines
    assert "a" in render_chat(MESSAGES, build_tokenizer(template=CHATML))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_template_is_stopped_again_where_python_dropped_the_first_exception(monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.2)
    begun = time.monotonic()
    with pytest.raises(TemplateLimitError, match="chat template did not end"):
        looped_behind_a_finalizer(15)
    assert time.monotonic() - begun < 10
