"""Check that a chat template has written all that a conversation says.

Every content, thought, call and result of a tool is looked for in the rendered text, in order. A
short text may be there by chance, so the template also renders the conversation with a mark in
place of each text. Templates may drop the thoughts of earlier turns, trim white space, and move a
system message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from rlhf_lightning.text.forms import SYSTEM, THOUGHT, Form, is_spelled

Path = tuple[str | int, ...]
Write = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]
_MARK = "zq{}qz"
_THINK, _THOUGHT_END = "<think>", "</think>"
_CALLS = "tool_calls"
_KEY = ""  # ends the path of a name, whose value has the path without it
# A template may rename the types of a schema.
_TYPES = ("type", "format", "strict", "$schema", "additionalProperties")


class _Piece(NamedTuple):
    path: Path
    text: str
    optional: bool = False  # the template may drop it


@dataclass(frozen=True)
class Fidelity:
    """Compares a conversation with what its template wrote.

    Args:
        messages: messages of the record.
        variables: further variables of the template, `tools` and `documents` among them.
        form: the form that the template takes.
        write: renders messages with variables, or raises ValueError.
        learnt: indices of the messages that are learnt: their thoughts must be written.
    """

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    form: Form
    write: Write
    learnt: Collection[int] = ()

    def lost(self, text: str) -> list[str]:
        """Return what is not in `text`, each in a few words."""
        missing = [name for name in ("tools", "documents") if self._ignores(name, text)]
        start = 0
        for index, message in enumerate(self.messages):
            begin = at = 0 if message["role"] in SYSTEM else start  # templates move it
            in_parts = message["role"] in self.form.parts
            listed = [(index, "content")] * (in_parts and is_spelled(message["content"], text))
            for piece in self._pieces(index, message, text, begin):
                end = _end(piece.text, text, at, escaped=message["role"] == "tool")
                if end < 0 and _CALLS in piece.path:  # in any order
                    end = _end(piece.text, text, begin, escaped=True)
                is_lost = end < 0 or piece.path in listed or not self._is_marked(piece, text)
                if is_lost and not self._is_turned(piece, text):
                    missing += [] if piece.optional else [_named(piece, message["role"])]
                at = at if piece.path[-1] == _KEY else max(at, end)  # a short one may be far behind
            start = start if message["role"] in SYSTEM else at
        return missing

    def _pieces(
        self, index: int, message: Mapping[str, Any], text: str, begin: int
    ) -> Iterator[_Piece]:
        is_answer = message["role"] == "assistant"
        earlier = is_answer and index not in self.learnt
        if thought := message.get(THOUGHT, "").strip():
            yield _Piece((index, THOUGHT), thought, earlier and self.form.thought is not None)
        content = message["content"].strip()
        is_rewritten = is_answer and _THOUGHT_END in content and text.find(content, begin) < 0
        if is_rewritten and (_THOUGHT_END in text[begin:] or self._knows_thoughts(index)):
            thought, _, content = map(str.strip, content.rpartition(_THOUGHT_END))
            thought = thought.removeprefix(_THINK).strip()
            yield from [_Piece((index, "content"), thought, earlier)] * bool(thought)
        if content:
            yield _Piece((index, "content"), content)
        for number, call in enumerate(message.get(_CALLS, ())):
            path = (index, _CALLS, number, "function")
            for name in ("name", "arguments"):
                for leaf, value in _leaves(call["function"][name], (*path, name), every=True):
                    yield _Piece(leaf, value)

    def _knows_thoughts(self, index: int) -> bool:
        """Return True if the template rewrites `<think>` alone, and not all that it is given."""
        plain = self.messages[index]["content"].strip().replace("think>", "zq>")
        return plain in self._with({(index, "content"): plain})

    def _ignores(self, name: str, text: str) -> bool:
        if not (value := self.variables.get(name)):
            return False
        rest = {key: each for key, each in self.variables.items() if key != name}
        said = [leaf for path, leaf in _leaves(value, (), keys=True) if path[-1] not in _TYPES]
        try:
            ignored = self.write(self.messages, rest) == text
        except ValueError:  # it needs them
            ignored = False
        return ignored or any(_end(leaf, text, 0, escaped=True) < 0 for leaf in said)

    def _is_marked(self, piece: _Piece, text: str) -> bool:
        if piece.path in self._written:
            return True
        mark, leaf = _MARK.format(""), _at(self.messages, piece.path)
        changes = (str(leaf).replace(piece.text, piece.text + mark, 1), f"{mark}{leaf}")
        texts = [self._with({piece.path: changed}) for changed in changes]
        asks = piece.path[-1] == _KEY and text not in texts  # the template reads this name alone
        return asks or any(mark in changed for changed in texts)

    def _is_turned(self, piece: _Piece, text: str) -> bool:
        """Return True for a truth value that the template writes in its own words."""
        value = _at(self.messages, piece.path)
        return isinstance(value, bool) and self._with({piece.path: not value}) not in ("", text)

    @cached_property
    def _written(self) -> frozenset[Path]:
        """The places whose marks the template writes; known for plain conversations."""
        simple = not self.variables and all(len(message) == 2 for message in self.messages)
        key = tuple((m["role"], not m["content"].strip()) for m in self.messages)
        if not simple or key not in self.form.written:
            pieces = [p for i, m in enumerate(self.messages) for p in self._pieces(i, m, "", 0)]
            marks = {piece.path: _MARK.format(number) for number, piece in enumerate(pieces)}
            keys = {path: mark for path, mark in marks.items() if path[-1] == _KEY}
            text = self._with({path: marks[path] for path in marks.keys() - keys})
            text += self._with(keys) if keys else ""
            written = frozenset(path for path, mark in marks.items() if mark in text)
            if not simple:
                return written
            self.form.written[key] = written
        return self.form.written[key]

    def _with(self, changes: Mapping[Path, Any]) -> str:
        try:
            return self.write(_replaced(self.messages, (), changes), self.variables)
        except ValueError:  # the template refuses these words
            return ""


def _end(piece: str, text: str, start: int, *, escaped: bool) -> int:
    """Return the end of the first `piece` in the text from `start` on; -1 if there is none."""
    if (at := text.find(piece, start)) >= 0:
        return at + len(piece)
    if escaped:
        python = [repr(piece.title())] * (piece in ("true", "false"))
        as_json = [json.dumps(piece, ensure_ascii=is_ascii) for is_ascii in (False, True)]
        for spelled in (*as_json, repr(piece), *python):
            if (at := text.find(spelled[1:-1], start)) >= 0:
                return at + len(spelled) - 2
    return -1


def _leaves(
    value: Any, path: Path, *, keys: bool = False, every: bool = False
) -> Iterator[tuple[Path, str]]:
    """Yield the texts of a nested value with their places, as JSON spells numbers.

    Args:
        value: a value as JSON has them.
        path: its place.
        keys: yield the names of properties, too.
        every: yield all names and truth values, too.
    """
    if isinstance(value, Mapping):
        for key, each in value.items():
            if (every and key.strip()) or (keys and path[-1:] == ("properties",)):
                yield (*path, key, _KEY), key
            yield from _leaves(each, (*path, key), keys=keys, every=every)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _leaves(each, (*path, number), keys=keys, every=every)
    elif isinstance(value, str):
        yield from [(path, value.strip())] * bool(value.strip())
    elif isinstance(value, int | float) and (every or not isinstance(value, bool)):
        yield path, json.dumps(value)


def _at(value: Any, path: Path) -> Any:
    """Return the value at a place, or the name that the place is of."""
    if path[-1] == _KEY:
        return path[-2]
    for key in path:
        value = value[key]
    return value


def _replaced(value: Any, path: Path, changes: Mapping[Path, Any]) -> Any:
    if path in changes:
        return changes[path]
    if isinstance(value, Mapping):
        return {
            changes.get((*path, key, _KEY), key): _replaced(each, (*path, key), changes)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replaced(each, (*path, number), changes) for number, each in enumerate(value)]
    return value


def _named(piece: _Piece, role: str) -> str:
    index, *rest = piece.path
    what = ".".join(map(str, rest)).removesuffix(f".{_KEY}")
    short = piece.text if len(piece.text) <= 40 else f"{piece.text[:40]}..."
    return f"{what} of message {int(index) + 1} ({role}), {short!r}"
