"""Columns of a row that belong to its conversation, in addition to the texts.

| column                 | what is made of it                                                   |
|------------------------|----------------------------------------------------------------------|
| `tools`, `documents`   | lists of objects, or a text of them: variables of the chat template  |
| `chat_template_kwargs` | an object, or a text of one: further variables                       |
| `system`               | a text: the system message, where the conversation has none          |
| `history`              | earlier turns: messages, or pairs of a question and an answer        |

A text is JSON, or what Python prints. Of plain texts, and with other values, they are columns like
any other, named as not read. A column is hidden with `columns={tools: null}`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_lightning.data.conversations import parse_messages
from rlhf_lightning.data.errors import BadRecordError, Location, describe
from rlhf_lightning.data.records import VARIABLES, Record, TextRecord
from rlhf_lightning.data.turns import from_json, json_list
from rlhf_lightning.text.forms import SYSTEM

*_LISTS, _KWARGS = VARIABLES
ROW_KEYS = (*VARIABLES, "system", "history")
_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def is_of_conversation(column: str) -> bool:
    """Return True for a name of `ROW_KEYS`, or one that holds it as a word: `system_prompt`."""
    return column in ROW_KEYS or not set(ROW_KEYS).isdisjoint(words_of(column))


def words_of(name: str) -> list[str]:
    """Return the words of a column's name in lower case: `systemPrompt` has two."""
    return re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def with_row_keys(
    record: Record, ours: Mapping[str, Any], where: Location
) -> tuple[Record, list[str]]:
    """Return the record of a row with what these columns say, and those that were used.

    Raises:
        BadRecordError: if one cannot be used.
    """
    given = {key: ours[key] for key in ROW_KEYS if ours.get(key)}
    if not given or isinstance(record, TextRecord) or isinstance(record.prompt, str):
        return record, []
    variables = {key: listed for key in _LISTS if (listed := json_list(given.get(key)))}
    kwargs = _kwargs(given.get(_KWARGS, {}), where)
    history = _history(given.get("history"))
    earlier = () if history is None else parse_messages(history, "history", where)
    system = given.get("system")
    prompt = (*earlier, *record.prompt)
    if isinstance(system, str) and system.strip():
        own = [m["content"] for m in prompt if m["role"] in SYSTEM]
        if own and own != [system]:
            found = "the column 'system' and the conversation have different system messages"
            raise BadRecordError(where, found, "hide the column with columns={system: null}")
        if not own:
            system_message = {"role": "system", "content": system}
            prompt = (*parse_messages([system_message], "system", where), *prompt)
    read = {**variables, _KWARGS: kwargs, "history": earlier, "system": isinstance(system, str)}
    changed = replace(record, prompt=prompt, variables={**variables, **kwargs})
    return changed, [key for key in read if read[key]]


def as_columns(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that give a record these variables, see `with_row_keys`."""
    named = {key: variables[key] for key in _LISTS if key in variables}
    others = {key: each for key, each in variables.items() if key not in named}
    return named | ({_KWARGS: others} if others else {})


def _kwargs(value: Any, where: Location) -> dict[str, Any]:
    kwargs = from_json(value)
    if not isinstance(kwargs, Mapping):
        found = f"the key {_KWARGS!r} holds {describe(value)}, expected an object"
        raise BadRecordError(where, found, f"hide it with columns={{{_KWARGS}: null}}")
    for key in kwargs:
        if key in _ARGUMENTS:
            found = f"{_KWARGS} has {key!r}, which is no variable of a chat template"
            raise BadRecordError(where, found, "take it out, or give tools as a column")
    return {key: each for key, each in kwargs.items() if each is not None}


def _history(value: Any) -> list[Any] | None:
    if (messages := json_list(value)) is not None:
        return messages
    turns = from_json(value)
    if not isinstance(turns, list | tuple) or not turns:
        return None
    if any(isinstance(turn, str | Mapping) or len(turn) != 2 for turn in turns):
        return None
    roles = ("user", "assistant")
    return [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(roles, turn, strict=True)
    ]
