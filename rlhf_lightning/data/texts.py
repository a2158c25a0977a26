r"""Texts of a row: plain, or messages with one name for each thing that they hold.

| key of a message                             | what is made of it                               |
|----------------------------------------------|--------------------------------------------------|
| `role`                                       | one of ours; ShareGPT's and Gemini's are renamed |
| `content`                                    | text; parts of text are joined                   |
| `reasoning_content`, `reasoning`, `thinking` | `reasoning_content`                              |
| `tool_calls`                                 | a list of functions with arguments as an object  |
| `weight: 0`, `train: false`, `loss: false`   | `weight`: the message is not trained on          |
| `function_call`                              | refused                                          |
| any other                                    | given to the chat template as it is              |

A key that holds null is none. Nulls further inside, of a call's arguments or a tool's schema, stay;
those with which a table fills its objects are taken out before, see `without_fill`. The messages of
a cell of text, as CSV has them, are JSON. A transcript is a whole dialogue in one text, as
Anthropic/hh-rlhf writes it: `\n\nHuman: ...\n\nAssistant: ...`.

A text that cannot be used is a `BadValueError`; who knows its row adds the place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rlhf_lightning.data.errors import describe, wrong_value
from rlhf_lightning.data.records import ROLES
from rlhf_lightning.text.messages import THOUGHT, THOUGHTS, WEIGHT, BadValueError, Messages, Text

CALLS = "tool_calls"
ANSWER_MARK = "\n\nAssistant:"
_EXAMPLE = '[{"role": "user", "content": "..."}, ...]'
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
_WEIGHTS = (WEIGHT, "train", "loss")
_IS_TRAINED = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
_READ = {"role", "content", CALLS, "function_call", *_WEIGHTS, *THOUGHTS}


def parse_text(value: Any, key: str) -> Text:
    """Return a plain text or a conversation.

    Raises:
        BadValueError: if it is neither text nor a list of messages.
    """
    if isinstance(value, str):
        return check_characters(value, f"the key {key!r}")
    if isinstance(value, list | tuple):
        return parse_messages(value, key)
    raise wrong_value(key, value, "text or a list of messages", f'write "...", or {_EXAMPLE}')


def parse_messages(value: Any, key: str) -> Messages:
    """Return a conversation, its messages in one form.

    Raises:
        BadValueError: if it is no list, empty, or has a message without a known role and a text.
    """
    if not isinstance(value, list | tuple) or not value:
        raise wrong_value(key, value, "a list of messages", f"write {_EXAMPLE}")
    return tuple(_parse_message(m, f"{key}[{i}]") for i, m in enumerate(value))


def messages_in(value: Any, key: str) -> Any:
    """Return the messages that a text spells in JSON, any other value as it is.

    Raises:
        BadValueError: for a text that begins as messages do and is not JSON.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{", "array", '"')):
        return value
    found = from_json(value)
    messages = [found] if isinstance(found, Mapping) else found
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return messages
    if isinstance(found, str) and _BEGINS_AS_MESSAGES.match(value):
        raise wrong_value(key, value, "messages, as it begins", "write them by json.dumps")
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


def without_fill(value: Any, objects: Any) -> Any:
    """Return a value without the nulls that fill its objects, and its arrays as lists.

    A table's column of objects has each key in every row, and null where a row had none.

    Args:
        value: cell of a row.
        objects: of its column, see `files.TableRow`.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        keys = objects if isinstance(objects, Mapping) else {}
        given = {key: each for key, each in value.items() if each is not None or key not in keys}
        return {key: without_fill(each, keys.get(key)) for key, each in given.items()}
    inside = objects[0] if isinstance(objects, list) else None
    return [without_fill(x, inside) for x in value] if isinstance(value, list | tuple) else value


def check_characters(text: str, name: str) -> str:
    """Return a text that can be written as UTF-8, which tokenizers and files need.

    Raises:
        BadValueError: if it holds half of a surrogate pair, as JSON may spell it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"{name} holds half of a character (U+{ord(text[error.start]):04X})"
        raise BadValueError(found, "write whole characters, as UTF-8") from error
    return text


# -- messages ----------------------------------------------------------------------------------


def _parse_message(message: Any, name: str) -> dict[str, Any]:
    if not _is_message(message):
        found = f"{name} is {describe(message)}, expected an object with 'role' and 'content'"
        raise BadValueError(found, f"write {_EXAMPLE}")
    given = {key: each for key, each in message.items() if each is not None}
    if {"from", "value"} <= message.keys() and not {"role", "content"} <= given.keys():
        turn = {"role": given.pop("from", None), "content": given.pop("value", None)}  # ShareGPT's
        given = {key: each for key, each in (turn | given).items() if each is not None}
    role = str(given.get("role")).lower()
    if role in _CALL_TURNS and CALLS not in given:
        call = from_json(given.pop("content", ""))
        given[CALLS] = [call] if isinstance(call, Mapping) else call or "no call"
    role = role if role in ROLES else _OTHER_ROLES.get(role, role)
    if role not in ROLES:
        found = f"{name} has the unknown role {describe(given.get('role'))}"
        raise BadValueError(found, f"use one of {', '.join(ROLES)}")
    if given.get("function_call"):
        raise BadValueError(f"{name} has the legacy key 'function_call'", f"write it as {CALLS}")
    calls = _calls(given.get(CALLS), name)
    content = _content(given.get("content", "" if calls else None), name)
    thought = _thought(given, content, name)
    return {
        "role": role,
        "content": content,
        **({THOUGHT: thought} if thought else {}),
        **({CALLS: calls} if calls else {}),
        **({} if _is_trained(given, name) else {WEIGHT: 0}),
        **{key: value for key, value in given.items() if key not in _READ},
    }


def _content(content: Any, name: str) -> str:
    if isinstance(content, list | tuple) and content:
        content = "".join(_text_of_part(part, name) for part in content)
    if not isinstance(content, str):
        found = f"the content of {name} is {describe(content)}, expected text"
        raise BadValueError(found, "write the message's text: only text is supported")
    return check_characters(content, f"the content of {name}")


def _text_of_part(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    is_text = isinstance(part, Mapping) and part.get("type") in _PART_TYPES
    others = is_text and any(part[key] for key in part.keys() - _PART_KEYS)
    if not is_text or others or not isinstance(part.get("text"), str):
        found = f"the content of {name} has the part {describe(part)}, expected text"
        raise BadValueError(found, 'write {"type": "text", "text": "..."}')
    return str(part["text"])


def _thought(given: Mapping[str, Any], content: str, name: str) -> str:
    thoughts = {key: given[key] for key in THOUGHTS if given.get(key)}
    if not thoughts:
        return ""
    first, *others = thoughts.values()
    if not isinstance(first, str) or any(each != first for each in others):
        found = f"{' and '.join(thoughts)} of {name} is not one text"
        raise BadValueError(found, f"write the thought as text under {THOUGHT!r}")
    if content.lstrip().startswith("<think>"):
        raise BadValueError(
            f"{name} has a thought under {THOUGHT!r} and as <think>", "take one out"
        )
    return check_characters(first, f"the {THOUGHT} of {name}")


def _calls(value: Any, name: str) -> list[dict[str, Any]]:
    value = from_json(value)
    if value and not isinstance(value, list | tuple):
        raise BadValueError(
            f"{CALLS} of {name} is {describe(value)}", 'write [{"name": "..."}, ...]'
        )
    return [_call(call, name) for call in value or ()]


def _call(call: Any, name: str) -> dict[str, Any]:
    outer = {k: v for k, v in call.items() if v is not None} if isinstance(call, Mapping) else {}
    bare = {key: outer.pop(key) for key in ("name", "arguments") if key in outer}
    function = outer.pop("function", bare)
    arguments = from_json(function.get("arguments")) if isinstance(function, Mapping) else None
    named = function.get("name") if isinstance(arguments, Mapping) else None
    if not isinstance(named, str) or not named.strip():
        found = f"a call of {name} is {describe(call)}, expected a name and arguments as an object"
        raise BadValueError(found, 'write {"name": "...", "arguments": {"key": "value"}}')
    others = {key: each for key, each in function.items() if each is not None}
    return {"type": "function", **outer, "function": {**others, "arguments": arguments}}


def _is_trained(given: Mapping[str, Any], name: str) -> bool:
    values = {_IS_TRAINED.get(str(given[key]).lower()) for key in _WEIGHTS if key in given}
    if None in values or len(values) > 1:
        found = f"{' or '.join(_WEIGHTS)} of {name} does not say whether it is learnt"
        raise BadValueError(found, f"write {WEIGHT}: 0 or {WEIGHT}: 1")
    return values != {False}


# -- transcripts -------------------------------------------------------------------------------


def is_transcript(text: object) -> bool:
    r"""Return True for a text that starts with `\n\nHuman:`."""
    return isinstance(text, str) and text.startswith("\n\nHuman:")


def parse_transcript(text: object, key: str) -> list[dict[str, str]]:
    r"""Return the messages of a transcript, white space around each removed.

    Args:
        text: transcript, `\n\nHuman: ...\n\nAssistant: ...`.
        key: the name of its column, for errors.

    Raises:
        BadValueError: if it is no text, starts otherwise, one side speaks twice in a row, or the
            last turn is not the assistant's.
    """
    if not isinstance(text, str) or _TURN.match(text) is None:
        raise wrong_value(key, text, "'\\n\\nHuman: ...'", "read other sets with HubSource")
    _, *pieces = _TURN.split(text)
    names = pieces[::2]
    if names != ["Human", "Assistant"] * (len(names) // 2):
        found = f"the turns of {key!r} are from {', '.join(names)}, expected both in turn"
        raise BadValueError(found, "join turns, end with 'Assistant', or leave it out")
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": x.strip()} for n, x in enumerate(pieces[1::2])]
