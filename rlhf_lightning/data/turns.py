"""A message of a conversation with all that its keys say, under one name each.

| key                                          | what is made of it                               |
|----------------------------------------------|--------------------------------------------------|
| `role`                                       | one of ours; ShareGPT's and Gemini's are renamed |
| `content`                                    | text; parts of text are joined                   |
| `reasoning_content`, `reasoning`, `thinking` | `reasoning_content`                              |
| `tool_calls`                                 | a list of functions with arguments as an object  |
| `weight: 0`, `train: false`, `loss: false`   | `weight`: the message is not learnt              |
| `function_call`                              | refused                                          |
| a turn from `function_call`                  | `tool_calls` of the assistant, read from its text |
| any other                                    | given to the chat template as it is              |

A key that holds null is none. Nulls further inside, of a call's arguments or a tool's schema, stay;
those of the rows of a table are taken out before, see `without_nulls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_lightning.data.cells import decoded
from rlhf_lightning.data.errors import BadRecordError, Location, closest, describe
from rlhf_lightning.data.records import ROLES
from rlhf_lightning.text.forms import THOUGHT, THOUGHTS, WEIGHT

CALLS = "tool_calls"
CALL_TURNS = ("function_call", "tool_call")  # who says the calls in ShareGPT's format
_OTHER_ROLES = {
    "human": "user",
    "prompter": "user",
    **dict.fromkeys(("observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("gpt", "chatgpt", "chatbot", "bing", "ai", "model", "bot"), "assistant"),
    **dict.fromkeys(CALL_TURNS, "assistant"),
}
_TEXT_PARTS = ("text", "input_text", "output_text", None)
_PART_KEYS = {"type", "text", "cache_control"}
_NO_ARGUMENTS = {"name", "arguments", "type", "id", "index"}  # of a call that has none
_LEARNT_KEYS = (WEIGHT, "train", "loss")
_LEARNT = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}


def parse_message(message: Any, name: str, where: Location) -> dict[str, Any]:
    """Return a message with a known role, its content as text, and its other keys.

    Raises:
        BadRecordError: if a key holds what it should not.
    """
    given = _filled(message) if isinstance(message, Mapping) else message
    keys = message.keys() if isinstance(message, Mapping) else set()
    if "role" not in keys or keys.isdisjoint(("content", CALLS)):
        found = f"{name} is {describe(message)}, expected an object with 'role' and 'content'"
        raise BadRecordError(where, found, 'write {"role": "user", "content": "..."}')
    role = message["role"]
    if isinstance(role, str) and role.lower() in CALL_TURNS and not given.get(CALLS):
        said = from_json(given.get("content"))
        given = {**given, CALLS: [said] if isinstance(said, Mapping) else said}
        message = {**message, "content": None}
    if isinstance(role, str) and role not in ROLES:  # of ShareGPT, Gemini, ...
        role = _OTHER_ROLES.get(role.lower(), role.lower())
    if role not in ROLES:
        hint = closest(role, ROLES) if isinstance(role, str) else None
        fix = f"did you mean {hint!r}?" if hint else f"use one of {', '.join(ROLES)}"
        raise BadRecordError(where, f"{name} has the unknown role {describe(message['role'])}", fix)
    if given.get("function_call"):
        fix = f"write it as {CALLS}, a list of functions with name and arguments"
        raise BadRecordError(where, f"{name} has the legacy key 'function_call'", fix)
    calls = [_call(each, name, where) for each in json_list(given.get(CALLS)) or ()]
    if given.get(CALLS) and not calls:
        found = f"{CALLS} of {name} is {describe(given[CALLS])}, expected a list of calls"
        raise BadRecordError(where, found, 'write [{"name": "...", "arguments": {}}]')
    thought = _thought(given, name, where)
    is_learnt = _is_learnt(given, name, where)
    used = {"role", "content", CALLS, "function_call", *_LEARNT_KEYS, *THOUGHTS}
    content = message.get("content")
    content = "" if content is None and calls else _content(content, name, where)
    if thought and content.lstrip().startswith("<think>"):
        found = f"{name} has a thought under {THOUGHT!r} and another as <think> in its content"
        raise BadRecordError(where, found, "take one of them out")
    return {
        "role": role,
        "content": content,
        **({THOUGHT: thought} if thought else {}),
        **({CALLS: calls} if calls else {}),
        **({} if is_learnt else {WEIGHT: 0}),
        **{key: value for key, value in given.items() if key not in used},
    }


def json_list(value: Any) -> list[Any] | None:
    """Return a list of objects, or the one that JSON spells; None for any other value."""
    value = from_json(value)
    value = value.tolist() if hasattr(value, "tolist") else value
    listed = isinstance(value, list | tuple) and all(isinstance(x, Mapping) for x in value)
    return [dict(each) for each in value] if listed and value else None


def from_json(value: Any) -> Any:
    """Return the object or list that a text spells in JSON or as Python prints it, or the value."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    found = decoded(value)
    return found if isinstance(found, Mapping | list) else value


def without_nulls(value: Any) -> Any:
    """Return a nested value without the keys that hold null.

    A column of objects has each key in every row, and null where a row had none.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list | tuple) else value


def _filled(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in value.items() if each is not None}


def _content(content: Any, name: str, where: Location) -> str:
    content = content.tolist() if hasattr(content, "tolist") else content
    if isinstance(content, list | tuple) and content:
        parts = [{"type": "text", "text": x} if isinstance(x, str) else x for x in content]
        for part in parts:
            is_text = isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS
            others = is_text and any(part[key] for key in part.keys() - _PART_KEYS)
            if not is_text or others or not isinstance(part.get("text"), str):
                found = f"the content of {name} has the part {describe(part)}, expected text"
                raise BadRecordError(where, found, 'write {"type": "text", "text": "..."}')
        content = "".join(part["text"] for part in parts)
    if not isinstance(content, str):
        found = f"the content of {name} is {describe(content)}, expected text"
        raise BadRecordError(where, found, "write the message's text: only text is supported")
    check_characters(content, f"the content of {name}", where)
    return content


def _thought(given: Mapping[str, Any], name: str, where: Location) -> str:
    thoughts = {
        given[key] if isinstance(given[key], str) else None: key
        for key in THOUGHTS
        if given.get(key)
    }
    if len(thoughts) > 1 or None in thoughts:
        found = f"{' and '.join(thoughts.values())} of {name} is not one text"
        raise BadRecordError(where, found, f"write the thought as text under {THOUGHT!r}")
    thought = next(iter(thoughts), "") or ""
    check_characters(thought, f"the {THOUGHT} of {name}", where)
    return thought


def _call(call: Mapping[str, Any], name: str, where: Location) -> dict[str, Any]:
    function = call.get("function", call)
    named = function.get("name") if isinstance(function, Mapping) else None
    own = isinstance(named, str) and bool(named.strip())
    arguments = from_json(function.get("arguments") or {}) if own else None
    others = {key for key in function if function[key]} - _NO_ARGUMENTS if own else set()
    elsewhere = "arguments" not in function and others
    if not isinstance(arguments, Mapping) or elsewhere:
        found = f"a call of {name} is {describe(call)}, expected a name and arguments as an object"
        raise BadRecordError(where, found, 'write {"name": "...", "arguments": {"key": "value"}}')
    outer = {key: call[key] for key in call if key not in ("name", "arguments", "function")}
    inner = {} if function is call else _filled(function)
    return {
        "type": "function",
        **_filled(outer),
        "function": {**inner, "name": named, "arguments": arguments},
    }


def _is_learnt(given: Mapping[str, Any], name: str, where: Location) -> bool:
    said = {_LEARNT.get(str(given[key]).lower()) for key in _LEARNT_KEYS if key in given}
    if None in said or len(said) > 1:
        found = f"{' or '.join(_LEARNT_KEYS)} of {name} does not say whether it is learnt"
        raise BadRecordError(where, found, f"write {WEIGHT}: 0 or {WEIGHT}: 1")
    return said != {False}


def check_characters(text: str, name: str, where: Location) -> None:
    """Check that a text can be written as UTF-8, which tokenizers and files need.

    Raises:
        BadRecordError: if it holds half of a surrogate pair, as JSON may spell it.
    """
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"{name} holds half of a character (U+{ord(text[error.start]):04X})"
        fix = "write the file again with whole characters, as UTF-8"
        raise BadRecordError(where, found, fix) from error
