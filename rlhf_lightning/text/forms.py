"""The form in which a chat template takes a message: found by rendering, not by reading it.

Templates differ in the shape of what they are given: content as text or as a list of parts, the
arguments of a call as an object or as JSON text, a thought under one of three keys. Tools have the
shape in which servers give them, `{"type": "function", "function": {...}}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from rlhf_lightning.text.messages import Turns

THOUGHT = "reasoning_content"
THOUGHTS = (THOUGHT, "reasoning", "thinking")
# What a template raises at a conversation that it was not made for.
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
WEIGHT = "weight"  # 0 for a response that is not learnt
SYSTEM = ("system", "developer")
READ_BY_US = frozenset(("role", "content", "tool_calls", THOUGHT, WEIGHT))
_QUESTION, _ANSWER = "zq0mark0qz", "zq1mark1qz"
_ARGUMENTS = {"a": 'say "x"'}
_CALL = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": _ARGUMENTS}}


@dataclass(frozen=True)
class Form:
    """The form in which a template takes messages.

    Args:
        parts: it takes content as a list of parts only.
        text_arguments: the arguments of a call are JSON text to it.
        thought: the key under which it writes the thought of a response; None if under none.
    """

    parts: bool = False
    text_arguments: bool = False
    thought: str | None = THOUGHT

    def shaped(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message of a record in this shape."""
        shaped = {key: value for key, value in message.items() if key != WEIGHT}
        if self.parts:
            shaped["content"] = [{"type": "text", "text": shaped["content"]}]
        if THOUGHT in shaped:
            shaped[self.thought or THOUGHT] = shaped.pop(THOUGHT)
        if self.text_arguments and "tool_calls" in shaped:
            shaped["tool_calls"] = [_with_text(call) for call in shaped["tool_calls"]]
        return shaped


def form_of(tokenizer: Any) -> Form:
    """Return the form of a tokenizer's chat template, found once."""
    known = _KNOWN.get(tokenizer)
    if known is None or known[0] != tokenizer.chat_template:
        known = _KNOWN[tokenizer] = (tokenizer.chat_template, _found(tokenizer))
    return known[1]


def apply(tokenizer: Any, messages: Turns, variables: Mapping[str, Any], **options: Any) -> str:
    """Return what the chat template makes of a record's messages, which get its form."""
    form, tools = form_of(tokenizer), variables.get("tools")
    if isinstance(tools, list | tuple):
        variables = {**variables, "tools": [_wrapped(tool) for tool in tools]}
    return _written(tokenizer, [form.shaped(m) for m in messages], **variables, **options)


def _written(tokenizer: Any, shaped: Turns, **options: Any) -> str:
    return str(tokenizer.apply_chat_template(shaped, tokenize=False, **options))


def _found(tokenizer: Any) -> Form:
    def tried(form: Form, before: Any = (), **answer: Any) -> str:
        question = {"role": "user", "content": _QUESTION}
        exchange = (*before, question, {"role": "assistant", "content": _ANSWER, **answer})
        try:
            return _written(tokenizer, [form.shaped(message) for message in exchange])
        except REFUSALS:
            return ""

    def num_written(parts: bool) -> int:
        text = tried(Form(parts))
        return sum(m in text and f"'text': '{m}'" not in text for m in (_QUESTION, _ANSWER))

    parts = num_written(True) > num_written(False)  # who takes text is given text
    plain, spelled = (
        tried(Form(parts, as_text), content="", tool_calls=[_CALL]) for as_text in (False, True)
    )
    as_text = bool(spelled) and (not plain or str(_ARGUMENTS) in plain)
    earlier = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "a"})
    thoughts = (  # Kimi K2 Thinking writes none in the first response
        key
        for key in THOUGHTS
        for before in ((), earlier)
        if _ANSWER in tried(Form(parts, thought=key), before, content="a", **{THOUGHT: _ANSWER})
    )
    return Form(parts, as_text, next(thoughts, None))


def _wrapped(tool: Any) -> Any:
    """Return a tool under `function`; one that is there already, or is none, as it is."""
    is_bare = isinstance(tool, Mapping) and isinstance(tool.get("name"), str)
    if not is_bare or "function" in tool or tool.get("type", "function") != "function":
        return tool
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": function}


_KNOWN: WeakKeyDictionary[Any, tuple[Any, Form]] = WeakKeyDictionary()
