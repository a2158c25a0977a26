"""Rows to records, in TRL's dataset formats under TRL's names, told by their keys.

| format                     | keys                          | native kind    |
|----------------------------|-------------------------------|----------------|
| language modelling         | `text`                        | texts          |
| prompt-only                | `prompt`                      | prompts        |
| prompt and completion      | `prompt completion`           | demonstrations |
| conversation               | `messages`                    | demonstrations |
| preference                 | `prompt chosen rejected`      | preferences    |
| preference, prompt implied | `chosen rejected`             | preferences    |

Each is plain (strings) or conversational (lists of `{"role", "content"}`), save `text` (plain) and
`messages` (conversational). Optional keys: `domain`, `margin`, `label` (of unpaired rows, see
`kinds.Labels`), `rendered` (true where the texts spell special tokens that are meant as tokens),
and the columns of a conversation (`with_row_keys`). All rows of a set have one format. Sides that
are transcripts, as in Anthropic/hh-rlhf, are read as conversations unless they are `rendered`.
Source: https://huggingface.co/docs/trl/dataset_formats.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import takewhile
from typing import Any

from rlhf_lightning.data.errors import BadRecordError, Location, closest, describe, wrong_value
from rlhf_lightning.data.files import Row, TableRow
from rlhf_lightning.data.public_formats import (
    PROMPTS,
    TEXT_KEYS,
    as_ours,
    mapping_of,
    misnamed,
    names_in,
    pair_of,
)
from rlhf_lightning.data.records import (
    ROW_KEYS,
    SIDES,
    VARIABLES,
    DemonstrationRecord,
    Origin,
    PreferenceRecord,
    PromptRecord,
    Record,
    TextRecord,
)
from rlhf_lightning.data.texts import (
    ANSWER_MARK,
    CALLS,
    check_characters,
    from_json,
    is_transcript,
    messages_in,
    parse_messages,
    parse_text,
    parse_transcript,
    without_fill,
)
from rlhf_lightning.text.messages import SYSTEM, THOUGHT, WEIGHT, BadValueError, Text

FILL = "fill it, or leave the record out"
_PAIRS = ("prompt+chosen+rejected", "chosen+rejected")
_NAMES = ("text", "prompt", "prompt+completion", "messages", *_PAIRS)
FORMATS = {name: tuple(name.split("+")) for name in _NAMES}
_QUIET = ("domain", "margin", "rendered")
KNOWN_KEYS = (*TEXT_KEYS, *_QUIET, "label", *ROW_KEYS)
_EMPTY = ("None", "", "[]", "{}", "nan")
*_LISTS, _KWARGS = VARIABLES


class RowParser:
    """Makes records of the rows of one set, whose format is that of its first good row.

    Args:
        columns: our name -> their name; null hides a column of ours that means something else.
        rendered: default of rows without that key.

    Raises:
        ValueError: if `columns` maps a name that is not one of ours.
    """

    def __init__(
        self, columns: Mapping[str, str | None] | None = None, *, rendered: bool = False
    ) -> None:
        self._columns = dict(columns or {})
        self._rendered = rendered
        self._began: tuple[str, str] | None = None  # format and style of the first good row
        for ours in self._columns.keys() - KNOWN_KEYS:
            hint = closest(ours, KNOWN_KEYS)
            meant = f"did you mean {hint!r}?" if hint else f"use one of {', '.join(KNOWN_KEYS)}"
            raise ValueError(f"columns (ours: theirs) maps {ours!r}, which is no key: {meant}")

    def __call__(self, row: Row, where: Location) -> Record:
        """Return the record of a row.

        Raises:
            BadRecordError: if it has none, or is of another format than the first.
        """
        try:
            return self._record(row, where)
        except BadValueError as error:
            raise BadRecordError(where, error.found, error.fix) from error

    def _record(self, row: Row, where: Location) -> Record:
        given: Row = {
            k: None if type(v).__name__ in ("NAType", "NaTType") else v for k, v in row.items()
        }
        said = given
        in_memory = isinstance(row, TableRow) and row.objects is None
        if isinstance(row, TableRow):
            objects = row.objects or {}
            said = {key: without_fill(each, objects.get(key)) for key, each in given.items()}
        row = said
        if not any(self._columns.get(key) for key in TEXT_KEYS):
            hidden = self._columns.keys() & set(TEXT_KEYS)
            row = as_ours({k: v for k, v in row.items() if k not in hidden})
            if line := misnamed(row):
                raise BadValueError(f"these are no keys of ours: {names_in(row)}", line)
        ours = self._renamed(row)
        domain, rendered = ours.get("domain", ""), self._is_rendered(ours)
        if not isinstance(domain, str):
            raise wrong_value("domain", domain, "text", "write a name, or leave it out")
        if in_memory:
            _check_nulls(ours)
        if not rendered:
            ours = _with_messages(ours)
        name = self._format(ours, row, rendered)
        record = replace(_record(name, ours), domain=domain, rendered=rendered)
        record, used = with_row_keys(record, ours)
        own = _style(record.text if isinstance(record, TextRecord) else record.prompt)
        if self._began is not None and own != self._began[1]:
            found = f"mixed formats: this record is {own}, the set began {self._began[1]}"
            raise BadValueError(found, "give each format a set of its own")
        self._began = (name, own)
        quiet = {self._columns.get(key, key) for key in ("prompt", "domain", "rendered")}
        read = {self._columns.get(key, key) for key in (*FORMATS[name], *_QUIET, *used)}
        sides = tuple(ours[side] for side in SIDES) if name == "chosen+rejected" else ()
        origin = Origin(
            where,
            columns={
                str(k): given[k] if v is said.get(k) else v
                for k, v in row.items()
                if k not in quiet and v is not None
            },
            unread=tuple(str(k) for k in row if k not in read and str(row[k]) not in _EMPTY),
            sides=sides if all(isinstance(side, str) for side in sides) else (),
        )
        return replace(record, origin=origin)

    def _renamed(self, row: Row) -> dict[str, Any]:
        """Return the row's values under our names, without nulls."""
        ours = {key: row[key] for key in KNOWN_KEYS if key in row and key not in self._columns}
        for name, theirs in self._columns.items():
            if theirs is not None and theirs not in row:
                hint = closest(theirs, row)
                meant = f"did you mean {hint!r}?" if hint else f"found {names_in(row)}"
                found = f"columns maps {name!r} to the key {theirs!r}, which is missing"
                raise BadValueError(found, meant)
            ours[name] = None if theirs is None else row[theirs]
        return {key: value for key, value in ours.items() if value is not None}

    def _is_rendered(self, ours: Mapping[str, Any]) -> bool:
        value = ours.get("rendered", self._rendered)
        if str(value).lower() not in ("true", "false"):  # a CSV cell is text
            raise wrong_value("rendered", value, "true or false", "or set columns={rendered: null}")
        return str(value).lower() == "true"

    def _format(self, ours: Mapping[str, Any], row: Row, rendered: bool) -> str:
        name = detect_format(ours)
        began = self._began[0] if self._began else name
        if began is None:
            # "context" is no misspelled "text".
            hints = ((key, closest(key, row, cutoff=0.75)) for key in TEXT_KEYS)
            meant = next((f"rename {near!r} to {key!r}, or " for key, near in hints if near), "")
            found = f"no known format has its keys: found {names_in(row)}, "
            fix = f"{meant}map them with {mapping_of(row)}, or {pair_of(row)}"
            raise BadValueError(
                found + "expected " + "; ".join(map(" ".join, FORMATS.values())), fix
            )
        missing = next((key for key in FORMATS[began] if key not in ours), None)
        if missing and set(FORMATS[name] if name else ()) <= set(FORMATS[began]):
            raise _missing(missing, row)
        if name != began:
            found = f"mixed formats: this record reads as {name!r}, the set began as {began!r}"
            raise BadValueError(found, "put each format into a separate set")
        other = next((key for key in PROMPTS if isinstance(row.get(key), str)), None)
        alone = name == "chosen+rejected" and "prompt" not in self._columns
        if other and alone and isinstance(ours["chosen"], str) and not rendered:
            fix = f"read it with columns={{prompt: {other}}}, or set columns={{prompt: null}}"
            raise BadValueError(f"the pair has no key 'prompt', but a column {other!r}", fix)
        return began


def detect_format(keys: Iterable[str]) -> str | None:
    """Return the name of the format (of `FORMATS`) that these keys speak of, or None.

    A key of the richest format decides: `prompt chosen` is a preference that lacks `rejected`, not
    a prompt with another column.
    """
    present = set(keys)
    if present & set(SIDES):
        return "prompt+chosen+rejected" if "prompt" in present else "chosen+rejected"
    if "completion" in present:
        return "prompt+completion"
    return next((name for name in ("messages", "prompt", "text") if name in present), None)


def _missing(key: str, row: Row) -> BadValueError:
    if key in row:
        return BadValueError(f"the key {key!r} holds null", "fill it, or drop the record")
    hint = closest(key, [name for name in row if name not in KNOWN_KEYS])
    meant = f"did you mean {hint!r}? Rename it, or pass " if hint else "pass "
    found = f"the key {key!r} is missing (found {names_in(row)})"
    return BadValueError(found, f"{meant}columns={{{key}: {hint or 'their_name'}}}")


def _check_nulls(ours: Mapping[str, Any]) -> None:
    """Refuse nulls that may be written, or fill the objects of a table that became a list."""
    for key, value in ours.items():
        if _holds_null(value, inside=key in _LISTS):
            found = f"{key!r} has a null in a tool, call or document: written, or a table's fill"
            raise BadValueError(found, "give the datasets.Dataset itself, or JSON of the value")


def _holds_null(value: Any, *, inside: bool) -> bool:
    """Return whether an object holds null, inside of a call's arguments if not `inside`."""
    if isinstance(value, Mapping):
        own = ((each, inside or key == "arguments") for key, each in value.items())
        return any((x is None and inside) or _holds_null(x, inside=deep) for x, deep in own)
    return isinstance(value, list) and any(_holds_null(x, inside=inside) for x in value)


def _with_messages(ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the messages that cells and transcripts spell."""
    parsed = {
        key: messages_in(value, key) if key in TEXT_KEYS[1:] else value
        for key, value in ours.items()
    }
    if isinstance(parsed.get("prompt"), str) and isinstance(ours.get("completion"), str):
        # The prompt may ask for JSON: what is no response of the assistant is text.
        found = parsed["completion"]
        roles = () if isinstance(found, str) else [m.get("role", m.get("from")) for m in found]
        if roles != ["assistant"]:
            parsed["completion"] = ours["completion"]
    if all(is_transcript(parsed.get(side)) for side in SIDES):
        parsed |= {side: parse_transcript(parsed[side], side) for side in SIDES}
    return parsed


# -- the record of a format --------------------------------------------------------------------


def _record(name: str, row: Mapping[str, Any]) -> Record:
    if name == "text":
        return _text_record(row["text"])
    if name == "messages":
        return _conversation(row["messages"])
    texts = {key: parse_text(row[key], key) for key in FORMATS[name]}
    record: Record
    if name == "prompt":
        if not texts["prompt"]:
            raise BadValueError("the key 'prompt' is empty", FILL)
        record = PromptRecord(texts["prompt"])
    elif name == "prompt+completion":
        record = DemonstrationRecord(texts["prompt"], texts["completion"])
    else:
        if texts["chosen"] == texts["rejected"]:
            found = f"'chosen' and 'rejected' are the same: {describe(row['chosen'])}"
            raise BadValueError(found, "leave the pair out: it says nothing")
        parts = implied_prompt(texts.get("prompt"), texts["chosen"], texts["rejected"])
        record = PreferenceRecord(*parts, margin=_margin(row.get("margin")))
    if not isinstance(record.prompt, str) and [m["role"] for m in record.prompt[-1:]] == [
        "assistant"
    ]:
        found = "the last message of 'prompt' is from 'assistant', which leaves nothing to answer"
        raise BadValueError(found, "end the prompt with a message from 'user'")
    for key in ("completion", *SIDES):
        if key in FORMATS[name]:
            check_response(record.prompt, getattr(record, key), key)
    return record


def _text_record(text: Any) -> TextRecord:
    if not isinstance(messages_in(text, "text"), str):
        fix = "give conversations under the key 'messages', or "
        raise wrong_value("text", text, "text", fix + "columns={messages: text, text: null}")
    if not text.strip():
        raise BadValueError("the key 'text' is empty", FILL)
    return TextRecord(check_characters(text, "the key 'text'"))


def _conversation(given: Any) -> DemonstrationRecord:
    messages = parse_messages(given, "messages")
    roles = [message["role"] for message in messages]
    if roles[-1] != "assistant" or "user" not in roles:
        found = f"'messages' are from {', '.join(roles)}, expected 'user' and at last 'assistant'"
        raise BadValueError(found, "end with the response, or give it as 'prompt' only")
    trained = [i for i, m in enumerate(messages) if roles[i] == "assistant" and m.get(WEIGHT) != 0]
    last = trained[-1] if trained else len(messages) - 1
    prompt, response = messages[:last], messages[last : last + 1]  # what is behind is not trained
    check_response(prompt, response, "messages")
    return DemonstrationRecord(prompt, response)


def _margin(value: Any) -> float | None:
    if value is None or value == "":
        return None
    try:
        # A CSV cell is text, and a truth value is an int to Python.
        margin = math.nan if isinstance(value, bool | list | dict) else float(value)
    except (ValueError, OverflowError):  # a whole number of 400 digits is no float
        margin = math.nan
    if not 0 <= margin < math.inf:
        raise wrong_value(
            "margin", value, "a finite number >= 0", "swap the sides, or leave it out"
        )
    return margin


def check_response(prompt: Text, response: Text, key: str) -> None:
    """Check that a response fits its prompt.

    Raises:
        BadValueError: if one is plain and the other conversational, if the response is empty, or
            if it is not one message of the assistant: results of tools and the template's marks
            between two turns are not what a policy writes.
    """
    columns = "prompt: null" if key in SIDES else f"messages: {key}, {key}: null, prompt: null"
    whole = f"where it is a whole conversation read it by columns={{{columns}}}"
    if isinstance(prompt, str) != isinstance(response, str):
        found = f"'prompt' is {_style(prompt)} but {key!r} is {_style(response)}"
        fix = "write both as text or both as lists of messages"
        raise BadValueError(found, fix if isinstance(response, str) else f"{fix}; {whole}")
    if isinstance(response, str):
        is_empty = not response.strip()
    else:
        roles = [message["role"] for message in response]
        if not prompt:
            raise BadValueError(
                f"no message is before {key!r}, so it answers nothing", "give 'prompt'"
            )
        if roles != ["assistant"]:
            found = f"{key!r} is from {', '.join(roles) or 'nobody, after the shared messages'}"
            found += ", expected only the assistant's response, one message"
            raise BadValueError(found, f"move the earlier messages to 'prompt'; {whole}")
        if response[-1].get(WEIGHT) == 0:
            raise BadValueError(
                f"the response of {key!r} has weight 0", "end with one that is learnt"
            )
        is_empty = not response[-1]["content"].strip() and CALLS not in response[-1]
    if is_empty:
        raise BadValueError(f"the response of {key!r} is empty", FILL)


def _style(text: Text) -> str:
    """Return the name of a text's style."""
    return "plain" if isinstance(text, str) else "conversational"


def implied_prompt(prompt: Text | None, chosen: Text, rejected: Text) -> tuple[Text, Text, Text]:
    """Return prompt, chosen and rejected; an implied prompt is taken out of the responses.

    Conversations share their first messages. Plain texts share their longest common prefix, cut
    back to a word's end, so that no word is split and the prompt does not end in white space;
    without a shared word the prompt is "". A plain prompt is also removed from conversations that
    contain it (as in some published sets).

    Raises:
        BadValueError: if one response is plain and the other conversational.
    """
    if isinstance(chosen, str) != isinstance(rejected, str):
        found = "'chosen' and 'rejected' are not both plain or both conversational"
        raise BadValueError(found, "write both as text or both as lists of messages")
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


# -- columns beside a conversation -------------------------------------------------------------


def with_row_keys(record: Record, ours: Mapping[str, Any]) -> tuple[Record, list[str]]:
    """Return the record of a conversation with what its other columns say, and those used.

    `tools` and `documents` (lists of objects) and `chat_template_kwargs` (an object), or JSON of
    them, are variables of the template; `system` is the system message. A column is hidden with
    `columns={tools: null}`.

    Raises:
        BadValueError: if one cannot be used.
    """
    given = {key: from_json(ours[key]) for key in ROW_KEYS if ours.get(key)}
    if not given or isinstance(record, TextRecord) or isinstance(record.prompt, str):
        return record, []
    if "history" in given:
        fix = "write earlier turns as messages, or hide the column with columns={history: null}"
        raise BadValueError("the column 'history' is not read beside a conversation", fix)
    kwargs = given.get(_KWARGS) or {}
    if kwargs and (not isinstance(kwargs, Mapping) or not _renderer_options().isdisjoint(kwargs)):
        found = f"{_KWARGS} holds {describe(kwargs)}, expected variables of a chat template"
        raise BadValueError(found, f"hide it with columns={{{_KWARGS}: null}}")
    kwargs = {key: each for key, each in kwargs.items() if each is not None}
    lists = {key: given[key] for key in _LISTS if isinstance(given.get(key), list | tuple)}
    lists = {key: x for key, x in lists.items() if x and all(isinstance(y, Mapping) for y in x)}
    used = [*lists, *([_KWARGS] if kwargs else [])]
    prompt, system = record.prompt, ours.get("system")
    if isinstance(system, str) and system.strip():
        used.append("system")
        own = [m["content"] for m in prompt if m["role"] in SYSTEM]
        if own and own != [system]:
            found = "the column 'system' and the conversation have different system messages"
            raise BadValueError(found, "hide the column with columns={system: null}")
        message = [{"role": "system", "content": system}]
        prompt = prompt if own else (*parse_messages(message, "system"), *prompt)
    return replace(record, prompt=prompt, variables={**lists, **kwargs}), used


@cache
def _renderer_options() -> frozenset[str]:
    from transformers import PreTrainedTokenizerBase  # half a second: only such rows pay

    return frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
