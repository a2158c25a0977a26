"""Check that a chat template has written all that a conversation says.

The conversation is rendered once more with a mark at both edges of every text, call and result of a
tool: what stands between two marks must be the text. Templates may drop the thoughts of earlier
turns, trim white space, and move a system message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from rlhf_lightning.text.forms import THOUGHT, Form
from rlhf_lightning.text.messages import Turns

Write = Callable[[Turns, Mapping[str, Any]], str]
_THINK, _THOUGHT_END = "<think>", "</think>"
# Rare letters: a text that is printed in quotes keeps them.
_MARKS = range(0x20000, 0x2A6DF)
# A template may rename the types of a schema.
_TYPES = ("type", "format", "strict", "$schema", "additionalProperties")


class _Piece(NamedTuple):
    """A text between two marks."""

    name: str
    forms: tuple[str, ...]  # the text, and how JSON and Python may spell it
    opening: str
    closing: str
    optional: bool  # the template may drop it


class _Marks:
    """Puts marks around the texts of a conversation."""

    def __init__(self, messages: Turns, form: Form, learnt: Collection[int]) -> None:
        said = json.dumps(messages, ensure_ascii=False, default=str)
        self._free = (mark for mark in map(chr, _MARKS) if mark not in said)
        self._form, self._learnt = form, learnt
        self.pieces: list[_Piece] = []
        self.others: list[tuple[str, str]] = []  # names and numbers, which no mark fits

    def message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with marks."""
        of = f"of message {index + 1} ({message['role']})"
        earlier = message["role"] == "assistant" and index not in self._learnt
        marked = dict(message)
        if THOUGHT in message:
            may_go = earlier and self._form.thought is not None
            marked[THOUGHT] = self._put(message[THOUGHT], f"{THOUGHT} {of}", optional=may_go)
        before, end, rest = message["content"].rpartition(_THOUGHT_END)
        if message["role"] == "assistant" and end:
            begin = before.find(_THINK) + len(_THINK) if before.lstrip().startswith(_THINK) else 0
            thought = self._put(before[begin:], f"content {of}", optional=earlier)
            said = self._put(rest, f"content {of}")
            marked["content"] = f"{before[:begin]}{thought}{end}{said}"
        else:
            escaped = message["role"] == "tool"
            marked["content"] = self._put(message["content"], f"content {of}", escaped=escaped)
        if "tool_calls" in message:
            marked["tool_calls"] = [
                {**call, "function": self._values(call["function"], f"{{}} {of}", "tool_calls")}
                for call in message["tool_calls"]
            ]
        return marked

    def _values(self, value: Any, of: str, path: str) -> Any:
        if isinstance(value, Mapping):
            if path != "tool_calls":
                self.others += [(of.format(path), str(key)) for key in value]
            return {key: self._values(each, of, f"{path}.{key}") for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._values(each, of, path) for each in value]
        if isinstance(value, str):
            return self._put(value, of.format(path), escaped=True)
        self.others += [(of.format(path), json.dumps(value))] * (value is not None)
        return value

    def _put(self, text: str, name: str, *, escaped: bool = False, optional: bool = False) -> str:
        if not (body := text.strip()):
            return text
        forms = _spellings(body) if escaped else (body,)
        piece = _Piece(name, forms, next(self._free), next(self._free), optional)
        self.pieces.append(piece)
        return text.replace(body, f"{piece.opening}{body}{piece.closing}", 1)


def lost(
    messages: Turns,
    variables: Mapping[str, Any],
    text: str,
    form: Form,
    write: Write,
    learnt: Collection[int] = (),
) -> list[str]:
    """Return what a template has not written, each in a few words.

    Args:
        messages: messages of the record.
        variables: further variables of the template, `tools` and `documents` among them.
        text: what the template made of them.
        form: the form that the template takes.
        write: renders messages with variables, or raises ValueError.
        learnt: indices of the messages that are learnt: their thoughts must be written.
    """

    def written(messages: Turns, variables: Mapping[str, Any]) -> str:
        try:
            return write(messages, variables)
        except ValueError:  # the template refuses these words, or needs the variable
            return ""

    missing = []
    for name in ("tools", "documents"):
        others = {key: each for key, each in variables.items() if key != name}
        value = variables.get(name)
        if value and (
            written(messages, others) == text or not all(_is_in(s, text) for s in _leaves(value))
        ):
            missing.append(name)
    marks = _Marks(messages, form, learnt)
    marked = written([marks.message(i, m) for i, m in enumerate(messages)], variables)
    same = marked
    for piece in marks.pieces:
        same = same.replace(piece.opening, "").replace(piece.closing, "")
    for piece in marks.pieces:
        is_there = _between(piece, marked, form) in piece.forms
        is_there &= same == text or any(each in text for each in piece.forms)
        is_dropped = piece.optional and piece.opening not in marked
        missing += [] if is_there or is_dropped else [_named(piece.name, piece.forms[0])]
    return missing + [_named(*other) for other in marks.others if not _is_in(other[1], text)]


def _between(piece: _Piece, marked: str, form: Form) -> str | None:
    """Return what stands between a text's marks; None if they are not there, or in a list."""
    before, _, rest = marked.partition(piece.opening)
    found, closed, _ = rest.partition(piece.closing)
    is_list = form.parts and before.endswith(("'text': '", "'text': \"", '"text": "'))
    return found if closed and not is_list else None


def _is_in(value: str, text: str) -> bool:
    return any(each in text for each in _spellings(value))


def _spellings(piece: str) -> tuple[str, ...]:
    """Return a text as it is, and as JSON and Python spell it within quotes."""
    as_json = (json.dumps(piece, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
    python = [piece.title()] * (piece in ("true", "false"))
    return (piece, *as_json, repr(piece)[1:-1], *python)


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts and numbers of tools or documents, and the names of properties."""
    if isinstance(value, Mapping):
        properties = value.get("properties")
        yield from properties if isinstance(properties, Mapping) else ()
        for key, each in value.items():
            if key not in _TYPES:
                yield from _leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str):
        yield value.strip()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)


def _named(name: str, text: str) -> str:
    return f"{name}, {text if len(text) <= 40 else f'{text[:40]}...'!r}"
