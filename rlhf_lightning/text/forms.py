"""The form in which a chat template takes a message: found by rendering, not by reading it.

Templates differ in the shape of what they are given: content as text or as a list of parts, the
arguments of a call as an object or as JSON text, a thought under one of three keys. Tools have the
shape in which servers give them, `{"type": "function", "function": {...}}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

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
_MESSAGE = "zq2mark2qz"
_TOOL = {
    "name": _MESSAGE,
    "description": "a",
    "parameters": {"type": "object", "properties": {}, "required": []},
}
_OTHERS = {  # roles whose content may have a shape that the user's has not, with what they end
    **{role: ({"role": role, "content": _MESSAGE},) for role in SYSTEM},
    "tool": (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": _MESSAGE, "name": "f", "tool_call_id": "call00001"},
    ),
}


@dataclass(frozen=True)
class Form:
    """The form in which a template takes messages.

    Args:
        parts: roles whose content it takes as a list of parts only.
        text_arguments: the arguments of a call are JSON text to it.
        thought: the key under which it writes the thought of a response; None if under none.
        bare_tools: tools are to it what others take under `function`.
        written: roles of a conversation -> indices of the messages that the template writes.
        read: has a role and a further key of its messages where the template reads it; else, with a
            number of messages, how many conversations of that length show that it does not.
    """

    parts: frozenset[str] = frozenset()
    text_arguments: bool = False
    thought: str | None = THOUGHT
    bare_tools: bool = False
    written: dict[Any, frozenset[Any]] = field(default_factory=dict)
    read: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def shaped(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message of a record in this shape."""
        shaped = {key: value for key, value in message.items() if key != WEIGHT}
        if shaped["role"] in self.parts:
            shaped["content"] = [{"type": "text", "text": shaped["content"]}]
        if THOUGHT in shaped:
            shaped[self.thought or THOUGHT] = shaped.pop(THOUGHT)
        if self.text_arguments and "tool_calls" in shaped:
            shaped["tool_calls"] = [_with_text(call) for call in shaped["tool_calls"]]
        return shaped

    def given(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return variables of the template, tools among them in the shape that it takes."""
        tools = variables.get("tools")
        if self.bare_tools or not isinstance(tools, list | tuple):
            return variables
        return {**variables, "tools": [_wrapped(tool) for tool in tools]}


def form_of(tokenizer: Any) -> Form:
    """Return the form of a tokenizer's chat template, found once."""
    known = _KNOWN.get(tokenizer)
    if known is None or known[0] != tokenizer.chat_template:
        known = _KNOWN[tokenizer] = (tokenizer.chat_template, _found(tokenizer))
    return known[1]


def apply(tokenizer: Any, conversation: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Return what the chat template makes of messages that have its form."""
    return str(tokenizer.apply_chat_template(list(conversation), tokenize=False, **options))


def is_spelled(content: str, text: str) -> bool:
    """Return True if a text shows the list of parts that a content was given as."""
    as_json = json.dumps(content, ensure_ascii=False)
    return f"'text': {content!r}" in text or f'"text": {as_json}' in text


def _found(tokenizer: Any) -> Form:
    def tried(form: Form, before: Any = (), **answer: Any) -> str:
        question = {"role": "user", "content": _QUESTION}
        exchange = (*before, question, {"role": "assistant", "content": _ANSWER, **answer})
        try:
            return apply(tokenizer, [form.shaped(message) for message in exchange])
        except REFUSALS:
            return ""

    others = frozenset((*SYSTEM, "user", "tool"))
    choices: tuple[frozenset[str], ...] = (
        frozenset(),
        others,
        others | {"assistant"},
        frozenset(("assistant",)),
    )

    def score(roles: frozenset[str]) -> int:
        text = tried(Form(roles))
        marks = (_QUESTION, _ANSWER)
        return 0 if any(is_spelled(m, text) for m in marks) else sum(m in text for m in marks)

    parts = max(choices, key=score)  # the first of the best: who takes text is given text
    plain, spelled = (
        tried(Form(parts, as_text), content="", tool_calls=[_CALL]) for as_text in (False, True)
    )
    as_text = bool(spelled) and (not plain or str(_ARGUMENTS) in plain)
    for role, before in _OTHERS.items():

        def writes(roles: frozenset[str], before: Any = before) -> bool:
            text = tried(Form(roles, as_text), before)
            return _MESSAGE in text and not is_spelled(_MESSAGE, text)

        parts = next(filter(writes, (parts, parts ^ {role})), parts)
    earlier = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "a"})
    thoughts = (  # Kimi K2 Thinking writes none in the first response
        key
        for key in THOUGHTS
        for before in ((), earlier)
        if _ANSWER in tried(Form(parts, thought=key), before, content="a", **{THOUGHT: _ANSWER})
    )
    form = Form(parts, as_text, next(thoughts, None))
    return replace(form, bare_tools=_takes_bare_tools(tokenizer, form))


def _takes_bare_tools(tokenizer: Any, form: Form) -> bool:
    question = form.shaped({"role": "user", "content": "a"})

    def writes(tool: Mapping[str, Any]) -> bool:
        try:
            return _MESSAGE in apply(tokenizer, [question], tools=[tool])
        except REFUSALS:
            return False

    return not writes(_wrapped(_TOOL)) and writes(_TOOL)


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
