r"""Texts of a row: plain, or messages with all that their keys say under one name each.

| key of a message                             | what is made of it                               |
|----------------------------------------------|--------------------------------------------------|
| `role`                                       | one of ours; ShareGPT's and Gemini's are renamed |
| `content`                                    | text; parts of text are joined                   |
| `reasoning_content`, `reasoning`, `thinking` | `reasoning_content`                              |
| `tool_calls`                                 | a list of functions with arguments as an object  |
| `weight: 0`, `train: false`, `loss: false`   | `weight`: the message is not learnt              |
| `function_call`                              | refused                                          |
| any other                                    | given to the chat template as it is              |

A key that holds null is none. Nulls further inside, of a call's arguments or a tool's schema, stay;
those of the rows of a table are taken out before, see `without_nulls`. The messages of a cell of
text, as CSV has them, are JSON. A transcript is a whole dialogue in one text, as Anthropic/hh-rlhf
writes it: `\n\nHuman: ...\n\nAssistant: ...`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_lightning.data.errors import BadRecordError, Location, describe, wrong_value
from rlhf_lightning.data.records import ROLES, VARIABLES, Record, TextRecord
from rlhf_lightning.text.messages import SYSTEM, THOUGHT, THOUGHTS, WEIGHT, Messages, Text

CALLS = "tool_calls"
SIDES = ("chosen", "rejected")
MESSAGES = 'write [{"role": "user", "content": "..."}, ...]'
ROW_KEYS = (*VARIABLES, "system", "history")  # columns of a conversation, beside its texts
ANSWER_MARK = "\n\nAssistant:"
_TURN = re.compile(r"\n\n(Human|Assistant):")
# Text that begins as messages do, in JSON or as Python or numpy print them.
_BEGINS_AS_MESSAGES = re.compile(r"""\W*(array\W+)?[\[{]\W*["'](role|content|from)\\*["']\s*:""")
_CALL_TURNS = ("function_call", "tool_call")  # who says the calls in ShareGPT's format
_OTHER_ROLES = {
    "human": "user",
    "prompter": "user",
    **dict.fromkeys(("observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("gpt", "chatgpt", "ai", "model", "bot", *_CALL_TURNS), "assistant"),
}
_PART_TYPES = ("text", "input_text", "output_text", None)
_PART_KEYS = {"type", "text", "cache_control"}
_LEARNT_KEYS = (WEIGHT, "train", "loss")
_LEARNT = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
*_LISTS, _KWARGS = VARIABLES
_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


# -- texts -------------------------------------------------------------------------------------


def parse_text(value: Any, key: str, where: Location) -> Text:
    """Return a plain text or a conversation.

    Raises:
        BadRecordError: if it is neither text nor a list of messages.
    """
    if isinstance(value, str):
        return check_characters(value, f"the key {key!r}", where)
    if isinstance(value, list | tuple):
        return parse_messages(value, key, where)
    raise wrong_value(where, key, value, "text or a list of messages", MESSAGES)


def parse_messages(value: Any, key: str, where: Location) -> Messages:
    """Return a conversation, its messages in one form.

    Raises:
        BadRecordError: if it is no list, empty, or has a message without a known role and a text.
    """
    if not isinstance(value, list | tuple) or not value:
        raise wrong_value(where, key, value, "a list of messages", MESSAGES)
    return tuple(_parse_message(m, f"{key}[{i}]", where) for i, m in enumerate(value))


def messages_in(value: Any, key: str, where: Location) -> Any:
    """Return the messages that a text spells in JSON, any other value as it is.

    Raises:
        BadRecordError: for a text that begins as messages do and is not JSON.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{", "array", '"')):
        return value
    found = from_json(value)
    messages = [found] if isinstance(found, Mapping) else found
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return messages
    if isinstance(found, str) and _BEGINS_AS_MESSAGES.match(value):
        fix = "write them whole and as JSON, by json.dumps"
        raise wrong_value(where, key, value, "messages, as it begins", fix)
    return value


def _is_message(value: Any) -> bool:
    keys = set(value) if isinstance(value, Mapping) else set()
    return ("role" in keys and bool({"content", CALLS} & keys)) or {"from", "value"} <= keys


def from_json(value: Any) -> Any:
    """Return the object or list that a text spells in JSON, any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def without_nulls(value: Any) -> Any:
    """Return a nested value without the keys that hold null, and its arrays as lists.

    A column of objects has each key in every row, and null where a row had none.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list | tuple) else value


def check_characters(text: str, name: str, where: Location) -> str:
    """Return a text that can be written as UTF-8, which tokenizers and files need.

    Raises:
        BadRecordError: if it holds half of a surrogate pair, as JSON may spell it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"{name} holds half of a character (U+{ord(text[error.start]):04X})"
        fix = "write the file again with whole characters, as UTF-8"
        raise BadRecordError(where, found, fix) from error
    return text


# -- messages ----------------------------------------------------------------------------------


def _parse_message(message: Any, name: str, where: Location) -> dict[str, Any]:
    if not _is_message(message):
        found = f"{name} is {describe(message)}, expected an object with 'role' and 'content'"
        raise BadRecordError(where, found, MESSAGES)
    given = {key: each for key, each in message.items() if each is not None}
    if {"from", "value"} <= message.keys() and not {"role", "content"} <= given.keys():
        turn = {"role": given.pop("from", None), "content": given.pop("value", None)}  # ShareGPT's
        given = {key: each for key, each in (turn | given).items() if each is not None}
    role = str(given.get("role")).lower()
    if role in _CALL_TURNS and CALLS not in given:
        said = from_json(given.pop("content", ""))
        given[CALLS] = [said] if isinstance(said, Mapping) else said or "no call"
    role = role if role in ROLES else _OTHER_ROLES.get(role, role)
    if role not in ROLES:
        found = f"{name} has the unknown role {describe(given.get('role'))}"
        raise BadRecordError(where, found, f"use one of {', '.join(ROLES)}")
    if given.get("function_call"):
        fix = f"write it as {CALLS}, a list of functions"
        raise BadRecordError(where, f"{name} has the legacy key 'function_call'", fix)
    calls = _calls(given.get(CALLS), name, where)
    content = _content(given.get("content", "" if calls else None), name, where)
    thought = _thought(given, content, name, where)
    used = {"role", "content", CALLS, "function_call", *_LEARNT_KEYS, *THOUGHTS}
    return {
        "role": role,
        "content": content,
        **({THOUGHT: thought} if thought else {}),
        **({CALLS: calls} if calls else {}),
        **({} if _is_learnt(given, name, where) else {WEIGHT: 0}),
        **{key: value for key, value in given.items() if key not in used},
    }


def _content(content: Any, name: str, where: Location) -> str:
    if isinstance(content, list | tuple) and content:
        parts = [{"text": x} if isinstance(x, str) else x for x in content]
        for part in parts:
            is_text = isinstance(part, Mapping) and part.get("type") in _PART_TYPES
            others = is_text and any(part[key] for key in part.keys() - _PART_KEYS)
            if not is_text or others or not isinstance(part.get("text"), str):
                found = f"the content of {name} has the part {describe(part)}, expected text"
                raise BadRecordError(where, found, 'write {"type": "text", "text": "..."}')
        content = "".join(part["text"] for part in parts)
    if not isinstance(content, str):
        found = f"the content of {name} is {describe(content)}, expected text"
        raise BadRecordError(where, found, "write the message's text: only text is supported")
    return check_characters(content, f"the content of {name}", where)


def _thought(given: Mapping[str, Any], content: str, name: str, where: Location) -> str:
    thoughts = {key: given[key] for key in THOUGHTS if given.get(key)}
    texts = list(thoughts.values())
    if any(not isinstance(each, str) or each != texts[0] for each in texts):
        found = f"{' and '.join(thoughts)} of {name} is not one text"
        raise BadRecordError(where, found, f"write the thought as text under {THOUGHT!r}")
    if texts and content.lstrip().startswith("<think>"):
        found = f"{name} has a thought under {THOUGHT!r} and another as <think> in its content"
        raise BadRecordError(where, found, "take one of them out")
    return check_characters(texts[0], f"the {THOUGHT} of {name}", where) if texts else ""


def _calls(value: Any, name: str, where: Location) -> list[dict[str, Any]]:
    value = from_json(value)
    if value and not isinstance(value, list | tuple):
        found = f"{CALLS} of {name} is {describe(value)}"
        raise BadRecordError(where, found, 'write a list, [{"name": "...", "arguments": {}}]')
    return [_call(call, name, where) for call in value or ()]


def _call(call: Any, name: str, where: Location) -> dict[str, Any]:
    outer = {k: v for k, v in call.items() if v is not None} if isinstance(call, Mapping) else {}
    bare = {key: outer.pop(key) for key in ("name", "arguments") if key in outer}
    function = outer.pop("function", bare)
    arguments = from_json(function.get("arguments")) if isinstance(function, Mapping) else None
    named = function.get("name") if isinstance(arguments, Mapping) else None
    if not isinstance(named, str) or not named.strip():
        found = f"a call of {name} is {describe(call)}, expected a name and arguments as an object"
        raise BadRecordError(where, found, 'write {"name": "...", "arguments": {"key": "value"}}')
    others = {key: each for key, each in function.items() if each is not None}
    return {"type": "function", **outer, "function": {**others, "arguments": arguments}}


def _is_learnt(given: Mapping[str, Any], name: str, where: Location) -> bool:
    said = {_LEARNT.get(str(given[key]).lower()) for key in _LEARNT_KEYS if key in given}
    if None in said or len(said) > 1:
        found = f"{' or '.join(_LEARNT_KEYS)} of {name} does not say whether it is learnt"
        raise BadRecordError(where, found, f"write {WEIGHT}: 0 or {WEIGHT}: 1")
    return said != {False}


# -- prompts and responses ---------------------------------------------------------------------


def check_response(prompt: Text, answer: Text, key: str, where: Location) -> None:
    """Check that a response fits its prompt.

    Raises:
        BadRecordError: if one is plain and the other conversational, if the response is empty, or
            if it is not one message of the assistant: results of tools and the template's marks
            between two turns are not what a policy writes.
    """
    columns = "prompt: null" if key in SIDES else f"messages: {key}, {key}: null, prompt: null"
    whole = f"where it is a whole conversation read it by columns={{{columns}}}"
    roles = [] if isinstance(answer, str) else [m["role"] for m in answer]
    empty = f"the response of {key!r} is empty: it would teach to say nothing"
    found, fix = "", "fill it, or leave the record out"
    if isinstance(prompt, str) != isinstance(answer, str):
        found = f"'prompt' is {style(prompt)} but {key!r} is {style(answer)}"
        fix = "write both as text or both as lists of messages" + (f"; {whole}" if roles else "")
    elif isinstance(answer, str):
        found = "" if answer.strip() else empty
    elif not prompt:
        found = f"no message comes before {key!r}, so it answers nothing"
        fix = "give the question under the key 'prompt'"
    elif roles != ["assistant"]:
        found = f"{key!r} is from {', '.join(roles) or 'nobody, after the shared messages'}"
        found += ", expected only the assistant's response, one message"
        fix = f"move the earlier messages to 'prompt'; {whole}"
    elif answer[-1].get(WEIGHT) == 0:
        found = f"the response of {key!r} has weight 0 (or train or loss: false)"
        fix = "end with a response that is learnt, or leave it out"
    elif not answer[-1]["content"].strip() and CALLS not in answer[-1]:
        found = empty
    if found:
        raise BadRecordError(where, found, fix)


def style(text: Text) -> str:
    """Return the name of a text's style."""
    return "plain" if isinstance(text, str) else "conversational"


def implied_prompt(
    prompt: Text | None, chosen: Text, rejected: Text, where: Location
) -> tuple[Text, Text, Text]:
    """Return prompt, chosen and rejected; an implied prompt is taken out of the responses.

    Conversations share their first messages. Plain texts share their longest common prefix, cut
    back to a word's end, so that no word is split and the prompt does not end in white space;
    without a shared word the prompt is "". A plain prompt is also removed from conversations that
    contain it (as in some published sets).

    Raises:
        BadRecordError: if one response is plain and the other conversational.
    """
    if isinstance(chosen, str) != isinstance(rejected, str):
        found = "'chosen' and 'rejected' are not both plain or both conversational"
        raise BadRecordError(where, found, "write both as text or both as lists of messages")
    shared = num_shared(chosen, rejected)
    if isinstance(chosen, str) and isinstance(rejected, str):
        shared = _shared_words(chosen, rejected)
    contents = [" ".join(m["content"].split()) for m in chosen[:shared] if not isinstance(m, str)]
    if prompt is None or (isinstance(prompt, str) and " ".join(prompt.split()) in contents):
        return chosen[:shared], chosen[shared:], rejected[shared:]
    return prompt, chosen, rejected


def num_shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many parts are alike at the start; ids and times of messages may differ."""

    def said(part: Any) -> Any:
        keys = ("role", "content", THOUGHT, CALLS)
        return part if isinstance(part, str) else [part.get(key) for key in keys]

    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: said(pair[0]) == said(pair[1]), pairs))


def _shared_words(first: str, second: str) -> int:
    """Return the length of the common prefix that ends with a whole word in both.

    Of transcripts it ends where the last shared turn of the assistant begins.
    """
    cut = num_shared(first, second)
    if is_transcript(first) and is_transcript(second):
        # Never inside a response: two responses may begin alike.
        turn = first[:cut].rfind(ANSWER_MARK)
        return turn + len(ANSWER_MARK) if turn >= 0 else 0
    if not all(cut == len(text) or text[cut].isspace() for text in (first, second)):
        cut = max((space.end() for space in re.finditer(r"\s", first[:cut])), default=0)
    return len(first[:cut].rstrip())


def is_transcript(text: object) -> bool:
    r"""Return True for a text that starts with `\n\nHuman:`."""
    return isinstance(text, str) and text.startswith("\n\nHuman:")


def parse_transcript(text: object, key: str, where: Location) -> list[dict[str, str]]:
    r"""Return the messages of a transcript, white space around each removed.

    Args:
        text: transcript, `\n\nHuman: ...\n\nAssistant: ...`.
        key: the name of its column, for errors.
        where: the row, for errors.

    Raises:
        BadRecordError: if it is no text, starts otherwise, one side speaks twice in a row, or the
            last turn is not the assistant's.
    """
    if not isinstance(text, str) or _TURN.match(text) is None:
        fix = "read other sets with data.sources.base.HubSource"
        raise wrong_value(where, key, text, "'\\n\\nHuman: ...'", fix)
    _, *pieces = _TURN.split(text)
    names = pieces[::2]
    if names != ["Human", "Assistant"] * (len(names) // 2):
        found = f"the turns of {key!r} are from {', '.join(names)}, expected both in turn"
        raise BadRecordError(where, found, "join turns, end with 'Assistant', or leave it out")
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": x.strip()} for n, x in enumerate(pieces[1::2])]


# -- columns beside a conversation -------------------------------------------------------------


def with_row_keys(
    record: Record, ours: Mapping[str, Any], where: Location
) -> tuple[Record, list[str]]:
    """Return the record of a conversation with what its other columns say, and those used.

    `tools` and `documents` (lists of objects) and `chat_template_kwargs` (an object), or JSON of
    them, are variables of the template; `system` is the system message. A column is hidden with
    `columns={tools: null}`.

    Raises:
        BadRecordError: if one cannot be used.
    """
    given = {key: from_json(ours[key]) for key in ROW_KEYS if ours.get(key)}
    if not given or isinstance(record, TextRecord) or isinstance(record.prompt, str):
        return record, []
    if "history" in given:
        found = "the column 'history' is not read beside a conversation"
        fix = "write earlier turns as messages, or hide the column with columns={history: null}"
        raise BadRecordError(where, found, fix)
    kwargs = given.get(_KWARGS) or {}
    if not isinstance(kwargs, Mapping) or not _ARGUMENTS.isdisjoint(kwargs):
        found = f"{_KWARGS} holds {describe(kwargs)}, expected variables of a chat template"
        raise BadRecordError(where, found, f"hide it with columns={{{_KWARGS}: null}}")
    kwargs = {key: each for key, each in kwargs.items() if each is not None}
    lists = {key: given[key] for key in _LISTS if given.get(key) and _are_objects(given[key])}
    used = [*lists, *([_KWARGS] if kwargs else [])]
    prompt, system = record.prompt, ours.get("system")
    if isinstance(system, str) and system.strip():
        used.append("system")
        own = [m["content"] for m in prompt if m["role"] in SYSTEM]
        if own and own != [system]:
            found = "the column 'system' and the conversation have different system messages"
            raise BadRecordError(where, found, "hide the column with columns={system: null}")
        message = [{"role": "system", "content": system}]
        prompt = prompt if own else (*parse_messages(message, "system", where), *prompt)
    return replace(record, prompt=prompt, variables={**lists, **kwargs}), used


def _are_objects(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value)


def as_columns(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that give a record these variables, see `with_row_keys`."""
    named = {key: variables[key] for key in _LISTS if key in variables}
    others = {key: each for key, each in variables.items() if key not in named}
    return named | ({_KWARGS: others} if others else {})


def with_system_in_user(prompt: Text) -> Text:
    """Return a prompt whose system messages are moved to the front of the user's next one."""
    if isinstance(prompt, str):
        return prompt
    messages: list[Mapping[str, Any]] = []
    for message in prompt:
        if message["role"] == "user":
            waiting = [m["content"] for m in messages if m["role"] in SYSTEM]
            messages = [m for m in messages if m["role"] not in SYSTEM]
            message = {**message, "content": "\n\n".join([*waiting, message["content"]])}
        messages.append(message)
    return tuple(messages)
