"""A text of a record: plain, or a conversation; any other value as text; texts with fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

Messages = tuple[Mapping[str, Any], ...]
Turns = Sequence[Mapping[str, Any]]
Text = str | Messages

THOUGHT = "reasoning_content"
THOUGHTS = (THOUGHT, "reasoning", "thinking")
WEIGHT = "weight"  # 0 for a response that is not trained on
SYSTEM = ("system", "developer")
# A prompt's column that holds its conversation as JSON; a plain prompt has none, or None.
CONVERSATION = "prompt_messages"
RENDERED = "true"  # its value for a prompt whose special tokens are tokens
READ_BY_US = frozenset(("role", "content", "tool_calls", THOUGHT, WEIGHT))


class BadValueError(ValueError):
    """A text, message or other value of a record that cannot be used.

    Args:
        found: the fact, first clause of the message.
        fix: the fix, second clause of the message.
    """

    def __init__(self, found: str, fix: str) -> None:
        """Make the message."""
        super().__init__(f"{found}. Fix: {fix}")
        self.found = found
        self.fix = fix


def as_text(value: Any) -> str:
    """Return a column's value as text: numbers, truth values and lists as JSON, None as ""."""
    if isinstance(value, bool | int | float | list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return "" if value is None else str(value)


def fields_of(template: str, name: str) -> tuple[str, ...]:
    """Return the names in a template's braces; `{{` and `}}` stand for braces themselves.

    Raises:
        ValueError: if there is none, or a brace holds anything but a name.
    """
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{name}={template!r} is no template: {error}") from error
    names = tuple(dict.fromkeys(key for _, key, _, _ in parts if key is not None))
    plain = all(key.isidentifier() for key in names)
    if not plain or any(spec or conversion for _, _, spec, conversion in parts):
        raise ValueError(f"{name}={template!r} must hold plain names in braces: {{field}}")
    if not names and name != "system":
        raise ValueError(f"{name}={template!r} has no {{field}}, so it is the same for every row")
    return names


def read_by_people(messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the system text that a conversation begins with, and the rest, without a template.

    Of several messages each begins with its role; what is no text is JSON.
    """
    first = messages[0] if messages else {}
    is_system = first.get("role") in SYSTEM
    rest = [
        (str(m.get("role")), told)
        for m in messages[is_system:]
        if (told := m.get("content")) or (told := {k: v for k, v in m.items() if k != "role"})
    ]
    texts = [f"{role}: {_text(told)}" for role, told in rest]
    alone = len(rest) == 1 and rest[0][0] == "user"
    return _text(first.get("content")) if is_system else "", (
        _text(rest[0][1]) if alone else "\n\n".join(texts)
    )


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def visible(text: str) -> str:
    """Return a text with pictures of its escape characters, which a terminal would obey."""
    return text.replace("\x1b", "\u241b").replace("\x9b", "\ufffd")
