"""Conversations as a chat template writes them, with the proof that it writes all of them.

* A template takes messages in one of several forms; which one is found by rendering, not by
  reading the template.
* The conversation is rendered once more with a mark at both edges of every text, call and result of
  a tool: what is between two marks must be the text. Templates may drop the thoughts of earlier
  turns, trim white space, and move a system message.
* The token that ends a response is the one behind the content. The date that a template writes is
  the same on all days, so that tokens do not depend on today.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.text.messages import (
    READ_BY_US,
    SYSTEM,
    THOUGHT,
    THOUGHTS,
    WEIGHT,
    BadValueError,
    Turns,
)

# The date that Llama's templates write where none is given.
DATE = "26 Jul 2024"
_CODES = ("%d", "%b", "%B", "%m", "%Y", "%y", "%a", "%A", "%H", "%M", "%S")
_SETTING = re.compile(r"\{%- set (\w+) = (.*?) %\}")
# What a template raises at a conversation that it was not made for.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
_OTHER = "set another template with model.chat_template=FILE or NAME"
_SKIP = "leave such records out with dataset.source.on_bad_record=skip"
_SYSTEM = "put system texts into the user's turn with dataset.source.system_into_user=true, "
_QUESTION, _ANSWER = "zq0mark0qz", "zq1mark1qz"
_ARGUMENTS = {"a": 'say "x"'}
_CALL = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": _ARGUMENTS}}
_THINK, _THOUGHT_END = "<think>", "</think>"
# Rare letters: a text that is printed in quotes keeps them.
_MARKS = range(0x20000, 0x2A6DF)
# A template may rename the types of a schema.
_TYPES = ("type", "format", "strict", "$schema", "additionalProperties")
# A noncharacter of Unicode, which no text holds.
_RESPONSE = "\ufdd0answer\ufdd0"
_EXCHANGE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": _RESPONSE})


class ChatTemplateError(BadValueError):
    """A conversation that a chat template refuses, or does not write in full."""


def write_chat(
    messages: Turns,
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return what the chat template makes of a conversation, whether that is all of it or not.

    Tools are given as servers give them, `{"type": "function", "function": {...}}`.

    Raises:
        BadValueError: if the tokenizer has no chat template.
        ChatTemplateError: if the template refuses the conversation.
    """
    if not tokenizer.chat_template:
        fix = "set model.chat_template=FILE or NAME (in Python chat_template=), or use plain text"
        raise BadValueError("the tokenizer has no chat template for conversations", fix)
    further = dict(variables or {})
    if isinstance(further.get("tools"), list | tuple):
        further["tools"] = [_as_function(tool) for tool in further["tools"]]
    try:
        shaped = [_form_of(tokenizer).shaped(message) for message in messages]
        return _applied(tokenizer, shaped, add_generation_prompt, further)
    except _REFUSALS as error:
        fix = _fix(any(message["role"] in SYSTEM for message in messages))
        raise ChatTemplateError(f"the chat template refuses the record: {error}", fix) from error


def render_chat(
    messages: Turns,
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
    trained: Collection[int] = (),
) -> str:
    """Return the whole conversation as its chat template writes it.

    Args:
        messages: messages of the conversation.
        tokenizer: the tokenizer with the template.
        add_generation_prompt: end with the text that introduces a response.
        variables: further variables of the template, such as `tools`.
        trained: indices of the messages that are trained on: their thoughts must be written.

    Raises:
        BadValueError: if the tokenizer has no chat template.
        ChatTemplateError: if the template refuses the conversation, or does not write all of it.
    """
    options = {"add_generation_prompt": add_generation_prompt}
    text = write_chat(messages, tokenizer, variables=variables, **options)
    missing = parts_missing(
        text, messages, tokenizer, variables=variables or {}, trained=trained, **options
    )
    if missing:
        found = f"the chat template does not write {', nor '.join(missing)}"
        of_system = any(f"({role})" in each for role in SYSTEM for each in missing)
        raise ChatTemplateError(found, _fix(of_system))
    return text


def _fix(has_system: bool) -> str:
    return f"{_SYSTEM * has_system}{_OTHER}, or {_SKIP}"


def _applied(
    tokenizer: Any, shaped: Turns, add_generation_prompt: bool, variables: Mapping[str, Any]
) -> str:
    return str(
        tokenizer.apply_chat_template(
            shaped, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
        )
    )


def _as_function(tool: Any) -> Any:
    """Return a tool under `function`; one that is there already, or is none, as it is."""
    is_bare = isinstance(tool, Mapping) and isinstance(tool.get("name"), str)
    if not is_bare or "function" in tool or tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


# -- the form of messages ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
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
        """Return a message of a record in this form."""
        shaped = {key: value for key, value in message.items() if key != WEIGHT}
        if self.parts:
            shaped["content"] = [{"type": "text", "text": shaped["content"]}]
        if THOUGHT in shaped:
            shaped[self.thought or THOUGHT] = shaped.pop(THOUGHT)
        if self.text_arguments and "tool_calls" in shaped:
            shaped["tool_calls"] = [_with_text(call) for call in shaped["tool_calls"]]
        return shaped


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


_FORMS: WeakKeyDictionary[Any, tuple[Any, _Form]] = WeakKeyDictionary()


def _form_of(tokenizer: Any) -> _Form:
    """Return the form that a tokenizer's chat template takes, found once."""
    template, form = _FORMS.get(tokenizer, (None, _Form()))
    if template != tokenizer.chat_template:
        form = _found_form(tokenizer)
        _FORMS[tokenizer] = tokenizer.chat_template, form
    return form


def _found_form(tokenizer: Any) -> _Form:
    def tried(form: _Form, before: Any = (), **answer: Any) -> str:
        question = {"role": "user", "content": _QUESTION}
        exchange = (*before, question, {"role": "assistant", "content": _ANSWER, **answer})
        try:
            return _applied(tokenizer, [form.shaped(message) for message in exchange], False, {})
        except _REFUSALS:
            return ""

    def num_written(parts: bool) -> int:
        text = tried(_Form(parts))
        return sum(m in text and f"'text': '{m}'" not in text for m in (_QUESTION, _ANSWER))

    parts = num_written(True) > num_written(False)  # who takes text is given text
    plain, spelled = (
        tried(_Form(parts, as_text), content="", tool_calls=[_CALL]) for as_text in (False, True)
    )
    as_text = bool(spelled) and (not plain or str(_ARGUMENTS) in plain)
    earlier = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "a"})
    thoughts = (  # Kimi K2 Thinking writes none in the first response
        key
        for key in THOUGHTS
        for before in ((), earlier)
        if _ANSWER in tried(_Form(parts, thought=key), before, content="a", **{THOUGHT: _ANSWER})
    )
    return _Form(parts, as_text, next(thoughts, None))


# -- the proof ---------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """A text between two marks."""

    name: str
    spellings: tuple[str, ...]  # the text, and how JSON and Python may spell it
    opening: str
    closing: str
    may_be_dropped: bool


class _Marked:
    """The messages of a conversation with a mark at both edges of every text.

    Attributes:
        messages: messages with marks.
        pieces: texts between the marks.
        others: name and spelling of what no mark fits: numbers, and the names of arguments.
    """

    def __init__(self, messages: Turns, thoughts_may_go: bool, trained: Collection[int]) -> None:
        written = json.dumps(messages, ensure_ascii=False, default=str)
        self._free = (mark for mark in map(chr, _MARKS) if mark not in written)
        self._thoughts_may_go = thoughts_may_go
        self.pieces: list[_Piece] = []
        self.others: list[tuple[str, str]] = []
        self.messages = [self._message(m, i, i in trained) for i, m in enumerate(messages)]

    def _message(self, message: Mapping[str, Any], index: int, trained: bool) -> dict[str, Any]:
        of = f"of message {index + 1} ({message['role']})"
        by_assistant = message["role"] == "assistant"
        earlier = by_assistant and not trained
        marked = dict(message)
        if THOUGHT in message:
            may_go = earlier and self._thoughts_may_go
            marked[THOUGHT] = self._put(message[THOUGHT], f"{THOUGHT} {of}", may_be_dropped=may_go)
        before, end, rest = message["content"].rpartition(_THOUGHT_END)
        if by_assistant and end:
            begin = before.find(_THINK) + len(_THINK) if before.lstrip().startswith(_THINK) else 0
            thought = self._put(before[begin:], f"content {of}", may_be_dropped=earlier)
            answer = self._put(rest, f"content {of}")
            marked["content"] = f"{before[:begin]}{thought}{end}{answer}"
        else:
            in_quotes = message["role"] == "tool"
            marked["content"] = self._put(message["content"], f"content {of}", in_quotes=in_quotes)
        if "tool_calls" in message:
            marked["tool_calls"] = [
                {**call, "function": self._values(call["function"], "tool_calls", of)}
                for call in message["tool_calls"]
            ]
        return marked

    def _values(self, value: Any, path: str, of: str) -> Any:
        if isinstance(value, Mapping):
            if path != "tool_calls":
                self.others += [(f"{path} {of}", str(key)) for key in value]
            return {key: self._values(each, f"{path}.{key}", of) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._values(each, path, of) for each in value]
        if isinstance(value, str):
            return self._put(value, f"{path} {of}", in_quotes=True)
        if value is not None:
            self.others.append((f"{path} {of}", json.dumps(value)))
        return value

    def _put(
        self, text: str, name: str, *, in_quotes: bool = False, may_be_dropped: bool = False
    ) -> str:
        if not (body := text.strip()):
            return text
        spellings = _spellings(body) if in_quotes else (body,)
        piece = _Piece(name, spellings, next(self._free), next(self._free), may_be_dropped)
        self.pieces.append(piece)
        return text.replace(body, f"{piece.opening}{body}{piece.closing}", 1)


def parts_missing(
    text: str,
    messages: Turns,
    tokenizer: PreTrainedTokenizerBase,
    *,
    variables: Mapping[str, Any],
    add_generation_prompt: bool = False,
    trained: Collection[int] = (),
) -> list[str]:
    """Return what a template has not written of a conversation, each part in a few words.

    Args:
        text: what the template made of the conversation.
        messages: messages of the conversation.
        tokenizer: the tokenizer with the template.
        variables: further variables of the template, `tools` and `documents` among them.
        add_generation_prompt: whether the text ends with what introduces a response.
        trained: indices of the messages that are trained on: their thoughts must be written.
    """

    def rewritten(messages: Turns, variables: Mapping[str, Any]) -> str:
        options = {"add_generation_prompt": add_generation_prompt}
        try:
            return write_chat(messages, tokenizer, variables=variables, **options)
        except ValueError:  # the template refuses these words, or needs the variable
            return ""

    missing = []
    for name in ("tools", "documents"):
        if value := variables.get(name):
            others = {key: each for key, each in variables.items() if key != name}
            is_written = all(_is_in(leaf, text) for leaf in _leaves(value))
            missing += [] if is_written and rewritten(messages, others) != text else [name]
    form = _form_of(tokenizer)
    marked = _Marked(messages, form.thought is not None, trained)
    proof = rewritten(marked.messages, variables)
    unmarked = proof
    for piece in marked.pieces:
        unmarked = unmarked.replace(piece.opening, "").replace(piece.closing, "")
    for piece in marked.pieces:
        is_there = _between(piece, proof, form.parts) in piece.spellings
        is_there &= unmarked == text or any(each in text for each in piece.spellings)
        is_dropped = piece.may_be_dropped and piece.opening not in proof
        missing += [] if is_there or is_dropped else [_named(piece.name, piece.spellings[0])]
    return missing + [_named(*other) for other in marked.others if not _is_in(other[1], text)]


def _between(piece: _Piece, proof: str, parts: bool) -> str | None:
    """Return what is between a text's marks; None if they are not there, or in a printed list."""
    before, _, rest = proof.partition(piece.opening)
    found, closed, _ = rest.partition(piece.closing)
    is_list = parts and before.endswith(("'text': '", "'text': \"", '"text": "'))
    return found if closed and not is_list else None


def _is_in(value: str, text: str) -> bool:
    return any(each in text for each in _spellings(value))


def _spellings(text: str) -> tuple[str, ...]:
    """Return a text as it is, and as JSON and Python spell it within quotes."""
    as_json = (json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
    python = [text.title()] * (text in ("true", "false"))
    return (text, *as_json, repr(text)[1:-1], *python)


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


# -- the template itself -----------------------------------------------------------------------


def unread_keys(
    messages: Turns, variables: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """Yield the keys of messages, and the variables, that the chat template does not name."""
    template = str(tokenizer.chat_template)
    further = {str(key) for message in messages for key in message.keys() - READ_BY_US}
    further |= variables.keys() - {"tools", "documents"}  # those are looked for in the text
    for key in further:
        is_set = key in variables and key in leading_settings(template)
        if is_set or re.search(rf"\b{re.escape(key)}\b", template) is None:
            yield key


def with_fixed_date(template: str, date: str = DATE) -> str:
    """Return the template with `date_string` and `strftime_now` of one day in front of it.

    A template that reads neither, or has a date in front already, stays as it is.

    Args:
        template: the chat template, Jinja source.
        date: the date, as in "26 Jul 2024".

    Raises:
        ValueError: if the date cannot be read.
    """
    reads = re.search(r"\b(?:date_string|strftime_now)\b", template) is not None
    if not reads or "date_string" in leading_settings(template):
        return template
    try:
        day = datetime.strptime(date, "%d %b %Y")
    except ValueError:
        raise ValueError(f"date_string={date!r} is no date: write it as {DATE!r}") from None
    formats = re.findall(r"strftime_now\(\s*['\"]([^'\"]*)", template)
    named = dict.fromkeys((*_CODES, *re.findall(r"%-?[A-Za-z]", "".join(formats))))
    codes = "".join(f" | replace('{code}', '{day.strftime(code)}')" for code in named)
    return (
        f"{{%- set date_string = {json.dumps(date)} %}}"
        f"{{%- macro strftime_now(format) %}}{{{{ format{codes} }}}}{{% endmacro %}}{template}"
    )


def leading_settings(template: str) -> dict[str, str]:
    """Return the variables that a template sets before anything else, with what they are set to."""
    found: dict[str, str] = {}
    at = 0
    while setting := _SETTING.match(template, at):
        found[setting[1]], at = setting[2], setting.end()
    return found


class TurnEnd(NamedTuple):
    r"""The text that a template writes behind the content of a response.

    Args:
        token: the first stop token there: `<end_of_turn>` of Gemma, `<|end|>` of Phi 3.
        token_id: id of the token.
        behind: text that follows the token: a line break, or EOS too.
        num_stops: number of stop tokens behind the content, this one included.
    """

    token: str
    token_id: int
    behind: str
    num_stops: int


def turn_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnd | None:
    """Return how the chat template ends a response; None without a template or an end token.

    It is found by rendering an exchange: the first special token behind the response, or else the
    first added one.
    """
    return first_stop(exchange(tokenizer)[1], tokenizer)


def exchange(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return an exchange as the chat template writes it, up to its response, and the text behind.

    Both are "" without a template.
    """
    try:
        text = write_chat(_EXCHANGE, tokenizer, add_generation_prompt=False)
    except ValueError:  # there is no template, or one for other conversations
        return "", ""
    before, found, behind = text.rpartition(_RESPONSE)
    return (before, behind) if found else ("", "")


def first_stop(text: str, tokenizer: PreTrainedTokenizerBase) -> TurnEnd | None:
    """Return the first stop token in what a template writes behind a response, or None."""
    added = tokenizer.added_tokens_decoder.items()
    ids = {token.content: i for i, token in added}
    for contents in ([token.content for _, token in added if token.special], ids):
        if match := any_of(contents).search(text):
            stops = (match[0], tokenizer.eos_token)
            num_stops = sum(found in stops for found in any_of(ids).findall(text))
            return TurnEnd(match[0], ids[match[0]], text[match.end() :], num_stops)
    return None


def any_of(contents: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of any of the texts, the longest first; empty ones left out."""
    longest_first = sorted(filter(None, contents), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
