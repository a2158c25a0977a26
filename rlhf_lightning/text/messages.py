"""A text of a record: plain, or a conversation; the text of any other value; templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from string import Formatter
from typing import Any

Messages = tuple[Mapping[str, Any], ...]
Text = str | Messages


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
