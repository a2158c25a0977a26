"""A text of a record: plain, or a conversation; the text of any other value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Messages = tuple[Mapping[str, Any], ...]
Text = str | Messages


def as_text(value: Any) -> str:
    """Return a column's value as text: numbers, truth values and lists as JSON, None as ""."""
    if isinstance(value, bool | int | float | list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return "" if value is None else str(value)
