"""Messages that lost their type: JSON, or Python's or numpy's print of a list, in a cell of text.

CSV has no lists, and pandas writes them as Python prints them.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Mapping
from typing import Any

from rlhf_lightning.data.errors import BadRecordError, Location, describe

# [{, "[{ of JSON in JSON, array([{, and a message without a list.
_START = re.compile(r"""[\s"'\\]*(array\()?[\s\[(]*\{[\s\\]*["']""")
_FIELDS = re.compile(r"""["'](role|from)\\*["']\s*:""")
_MESSAGE_FIRST = re.compile(r"""\s*(array\()?\s*\[\s*\{\s*["'](role|content|from)["']""")
_MOST_LAYERS = 3  # JSON of JSON of JSON
_OPEN, _CLOSE = "[{(", "]})"
_VALUES = (tokenize.STRING, tokenize.NUMBER, tokenize.NAME)


def messages_in(value: Any, key: str, where: Location) -> Any:
    """Return the messages that a text spells; an array as a list, any other value as it is.

    Raises:
        BadRecordError: for a text that begins as a list of messages and cannot be read.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if not isinstance(value, str) or not _START.match(value) or not _FIELDS.search(value):
        return value
    found: Any = value
    for _ in range(_MOST_LAYERS):
        found = decoded(found) if isinstance(found, str) else found
    messages = [found] if isinstance(found, Mapping) else found
    if isinstance(messages, list | tuple) and messages and all(map(_is_message, messages)):
        return list(messages)
    if found is None and _MESSAGE_FIRST.match(value):
        text = f"the key {key!r} holds {describe(value)}, which begins as messages do"
        raise BadRecordError(where, text, "write the whole list, in JSON Lines or as JSON")
    return value


def _is_message(value: Any) -> bool:
    keys = set(value) if isinstance(value, Mapping) else set()
    own = "role" in keys and bool({"content", "tool_calls"} & keys)
    return own or {"from", "value"} <= keys


def decoded(text: str) -> Any:
    """Return the value that a text spells in JSON or as Python or numpy print it, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(_as_python(text.strip()))
    except (ValueError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError):
        return None


def _as_python(text: str) -> str:
    """Return a print of numpy as one of Python: commas between values, and no `array(...)`."""
    words: list[str] = []
    open_brackets: list[str] = []
    ended = False  # the last word ends a value
    skipping = False  # the ", dtype=object" of an array
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        word = token.string
        if not word.strip():
            continue
        if word == "array":
            open_brackets.append(word)
            words += [","] if ended else []
            ended = False
        elif word in _OPEN:
            if open_brackets[-1:] == ["array"] and word == "(":
                open_brackets[-1] = "array("
                continue
            words += [",", word] if ended else [word]
            open_brackets.append(word)
            ended = False
        elif word in _CLOSE:
            of_array = open_brackets and open_brackets.pop() == "array("
            words += [] if of_array else [word]
            ended, skipping = True, False
        elif skipping or (word == "," and open_brackets[-1:] == ["array("]):
            skipping = True
        else:
            is_value = token.type in _VALUES
            words += [","] if ended and is_value else []
            words.append("None" if word == "nan" else word)
            ended = is_value
    return " ".join(words)
