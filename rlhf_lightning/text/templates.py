"""Conversations as a chat template writes them, with the proof that it writes all of them.

With the token by which it ends a response, and the date that it writes: one for all days, so that
tokens do not depend on today.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from rlhf_lightning.text.fidelity import lost
from rlhf_lightning.text.forms import READ_BY_US, REFUSALS, SYSTEM, apply, form_of
from rlhf_lightning.text.messages import Messages, Turns

# The date that Llama's templates write where none is given.
DATE = "26 Jul 2024"
_CODES = ("%d", "%b", "%B", "%m", "%Y", "%y", "%a", "%A", "%H", "%M", "%S")
_SETTING = re.compile(r"\{%- set (\w+) = (.*?) %\}")
# Placeholder for the response; a noncharacter of Unicode, which no text holds.
_ANSWER = "\ufdd0answer\ufdd0"
_EXCHANGE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER})
_OTHER = "set another template with model.chat_template=FILE or NAME"
_SKIP = "leave such records out with dataset.source.on_bad_record=skip"
_SYSTEM = "put system texts into the user's turn with dataset.source.system_into_user=true"


class ChatTemplateError(ValueError):
    """A conversation that a chat template refuses, or does not write in full.

    Args:
        found: the fact, first clause of the message.
        fix: the fix, second clause of the message.
    """

    def __init__(self, found: str, fix: str) -> None:
        """Make the message."""
        super().__init__(f"{found}. Fix: {fix}")
        self.found = found
        self.fix = fix


def write_chat(
    messages: Turns,
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return what the chat template makes of a conversation, whether that is all of it or not.

    Raises:
        ValueError: if the tokenizer has no chat template.
        ChatTemplateError: if the template refuses the conversation.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template, and the records are conversations: set "
            "model.chat_template=FILE or NAME (in Python chat_template=), or use plain text"
        )
    options = {"add_generation_prompt": add_generation_prompt}
    try:
        return apply(tokenizer, messages, variables or {}, **options)
    except REFUSALS as error:
        fix = _fix(any(message["role"] in SYSTEM for message in messages))
        raise ChatTemplateError(f"the chat template refuses the record: {error}", fix) from error


def _fix(has_system: bool) -> str:
    return f"{f'{_SYSTEM}, ' * has_system}{_OTHER}, or {_SKIP}"


def render_chat(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
    learnt: Collection[int] = (),
) -> str:
    """Return the whole conversation as its chat template writes it.

    Args:
        messages: messages of the conversation.
        tokenizer: the tokenizer with the template.
        add_generation_prompt: end with the text that introduces a response.
        variables: further variables of the template, such as `tools`.
        learnt: indices of the messages that are learnt, whose thoughts must be written.

    Raises:
        ValueError: if the tokenizer has no chat template.
        ChatTemplateError: if the template refuses the conversation, or does not write all of it.
    """

    def write(messages: Turns, variables: Mapping[str, Any]) -> str:
        options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        return write_chat(messages, tokenizer, variables=variables, **options)

    text = write(messages, variables or {})
    missing = lost(messages, variables or {}, text, form_of(tokenizer), write, learnt)
    if missing:
        found = f"the chat template does not write {', nor '.join(missing)}"
        of_system = any(f"({role})" in each for role in SYSTEM for each in missing)
        raise ChatTemplateError(found, _fix(of_system))
    return text


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
    codes = "".join(f" | replace('{code}', '{day.strftime(code)}')" for code in _CODES)
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
    try:
        text = write_chat(_EXCHANGE, tokenizer, add_generation_prompt=False)
    except ValueError:  # there is no template, or one for other conversations
        return None
    _, found, after = text.rpartition(_ANSWER)
    return first_stop(after, tokenizer) if found else None


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
