"""Rows to records, in TRL's dataset formats under TRL's names, detected by themselves.

| format                     | keys                          | native kind    |
|----------------------------|-------------------------------|----------------|
| language modelling         | `text`                        | texts          |
| prompt-only                | `prompt`                      | prompts        |
| prompt and completion      | `prompt completion`           | demonstrations |
| conversation               | `messages`                    | demonstrations |
| preference                 | `prompt chosen rejected`      | preferences    |
| preference, prompt implied | `chosen rejected`             | preferences    |

Each is plain (strings) or conversational (lists of `{"role", "content"}`), save `text` (plain) and
`messages` (conversational). Optional keys: `domain`, `margin`, and `rendered` (true where the texts
spell special tokens that are meant as tokens). All rows of a set have one format. Sides that are
transcripts, as in Anthropic/hh-rlhf, are read as conversations unless they are `rendered`.
Source: https://huggingface.co/docs/trl/dataset_formats.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlhf_lightning.data.conversations import (
    check_answer,
    check_characters,
    check_prompt,
    implied_prompt,
    parse_messages,
    parse_text,
)
from rlhf_lightning.data.errors import BadRecordError, Location, SkippedRecords, closest, describe
from rlhf_lightning.data.files import LocatedRow, Row
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    PromptRecord,
    Record,
    RecordKind,
    Text,
    TextRecord,
    kind_of,
)
from rlhf_lightning.data.sources.dialogues import SIDES, is_transcript, parse_transcript

OurRow = Mapping[str, Any]


def _parse_text_row(row: OurRow, where: Location) -> TextRecord:
    text = row["text"]
    if not isinstance(text, str):
        found = f"the key 'text' holds {describe(text)}, expected text"
        raise BadRecordError(where, found, "give conversations under the key 'messages'")
    check_characters(text, "the key 'text'", where)
    if not text.strip():
        raise BadRecordError(where, "the key 'text' is empty", "fill it, or leave the record out")
    return TextRecord(text)


def _parse_prompt_row(row: OurRow, where: Location) -> PromptRecord:
    prompt = parse_text(row["prompt"], "prompt", where)
    check_prompt(prompt, where)
    if not prompt:
        fix = "fill it, or leave the record out"
        raise BadRecordError(where, "the key 'prompt' is empty", fix)
    return PromptRecord(prompt)


def _parse_completion_row(row: OurRow, where: Location) -> DemonstrationRecord:
    prompt = parse_text(row["prompt"], "prompt", where)
    completion = parse_text(row["completion"], "completion", where)
    check_prompt(prompt, where)
    check_answer(prompt, completion, "completion", where)
    return DemonstrationRecord(prompt, completion)


def _parse_messages_row(row: OurRow, where: Location) -> DemonstrationRecord:
    messages = parse_messages(row["messages"], "messages", where)
    if messages[-1]["role"] != "assistant":
        found = f"the last of 'messages' is from {messages[-1]['role']!r}, expected 'assistant'"
        raise BadRecordError(where, found, "end with the answer, or give it as 'prompt' only")
    if all(message["role"] != "user" for message in messages):
        found = "'messages' has no message from 'user'"
        raise BadRecordError(where, found, "put the question before the answer")
    check_answer(messages[:-1], messages[-1:], "messages", where)
    return DemonstrationRecord(messages[:-1], messages[-1:])


def _parse_preference_row(row: OurRow, where: Location) -> PreferenceRecord:
    chosen = parse_text(row["chosen"], "chosen", where)
    rejected = parse_text(row["rejected"], "rejected", where)
    if chosen == rejected:
        found = f"'chosen' and 'rejected' are the same: {describe(row['chosen'])}"
        raise BadRecordError(where, found, "leave the pair out: it says nothing")
    given = parse_text(row["prompt"], "prompt", where) if "prompt" in row else None
    prompt, chosen, rejected = implied_prompt(given, chosen, rejected, where)
    check_prompt(prompt, where)
    check_answer(prompt, chosen, "chosen", where)
    check_answer(prompt, rejected, "rejected", where)
    return PreferenceRecord(prompt, chosen, rejected, margin=_parse_margin(row, where))


def _parse_margin(row: OurRow, where: Location) -> float | None:
    value = row.get("margin")
    if value is None or value == "":
        return None
    try:
        # A CSV cell is text, and a truth value is an int to Python.
        margin = math.nan if isinstance(value, bool | list | dict) else float(value)
    except (ValueError, OverflowError):  # a whole number of 400 digits is no float
        margin = math.nan
    if not math.isfinite(margin) or margin < 0:
        found = f"the key 'margin' holds {describe(value)}, expected a finite number >= 0"
        raise BadRecordError(where, found, "swap the sides of a negative one, or leave the key out")
    return margin


PARSERS: dict[str, Callable[[OurRow, Location], Record]] = {
    "text": _parse_text_row,
    "prompt": _parse_prompt_row,
    "prompt+completion": _parse_completion_row,
    "messages": _parse_messages_row,
    "prompt+chosen+rejected": _parse_preference_row,
    "chosen+rejected": _parse_preference_row,
}


FORMATS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "prompt": ("prompt",),
    "prompt+completion": ("prompt", "completion"),
    "messages": ("messages",),
    "prompt+chosen+rejected": ("prompt", "chosen", "rejected"),
    "chosen+rejected": ("chosen", "rejected"),
}
TEXT_KEYS = ("text", "prompt", "completion", "messages", "chosen", "rejected")
KNOWN_KEYS = (*TEXT_KEYS, "domain", "margin", "rendered")


@dataclass(frozen=True)
class ParsedRow:
    """A record, where it was read, and the row's other columns as text."""

    record: Record
    where: Location
    columns: Mapping[str, str]


def detect_format(keys: Iterable[str]) -> str | None:
    """Return the name of the format (of `FORMATS`) that these keys speak of, or None.

    A key of the richest format decides: `prompt chosen` is a preference that lacks `rejected`, not
    a prompt with another column.
    """
    present = set(keys)
    if present & {"chosen", "rejected"}:
        return "prompt+chosen+rejected" if "prompt" in present else "chosen+rejected"
    if "completion" in present:
        return "prompt+completion"
    return next((name for name in ("messages", "prompt", "text") if name in present), None)


def parse_rows(
    rows: Iterable[LocatedRow],
    *,
    columns: Mapping[str, str | None] | None,
    skipped: SkippedRecords,
    rendered: bool = False,
) -> list[ParsedRow]:
    """Return the records of one set, whose format is that of its first good row.

    Args:
        rows: rows with their locations, or the errors that stand in their places.
        columns: our name -> their name; null hides a column of ours that means something else.
        skipped: raises at a bad record or notes it.
        rendered: of rows that do not say it themselves.

    Raises:
        BadRecordError: for a bad record (unless skipped), and if no record is left.
        ValueError: if `columns` maps a name that is not one of ours.
    """
    mapping = check_columns(columns)
    parsed: list[ParsedRow] = []
    expected: tuple[str, bool] | None = None
    where = Location("the source")
    num_before = len(skipped.messages)  # of the other split of the source
    for where, row in rows:
        try:
            if isinstance(row, BadRecordError):
                raise row
            found, parsed_row = _parse_row(row, mapping, where, expected, rendered=rendered)
        except BadRecordError as error:
            skipped.add(error)
            continue
        expected = expected or found
        parsed.append(parsed_row)
    skipped.log(where.source, len(parsed))
    if not parsed:
        own = skipped.messages[num_before:]
        found_text = f"no record is left: all {len(own)} were bad"
        first = own[0] if own else "the source is empty"
        raise BadRecordError(Location(where.source), found_text, f"mend them; the first: {first}")
    return parsed


def check_columns(columns: Mapping[str, str | None] | None) -> dict[str, str | None]:
    """Return the mapping {ours: theirs}.

    Raises:
        ValueError: if one of ours is not a name we know.
    """
    for ours in columns or {}:
        if ours not in KNOWN_KEYS:
            hint = closest(ours, KNOWN_KEYS)
            meant = f", did you mean {hint!r}?" if hint else ""
            raise ValueError(
                f"columns maps {ours!r}, which is none of {', '.join(KNOWN_KEYS)}{meant} "
                "(columns is {ours: theirs})"
            )
    return dict(columns or {})


def to_kind(parsed: ParsedRow, kind: RecordKind) -> Record:
    """Return the row as a record of the wanted kind.

    A prompt may be taken from any record that has one (the row's other columns go with it), a
    demonstration from a preference (its chosen answer).

    Raises:
        BadRecordError: if the record cannot be turned into that kind, naming both.
    """
    record = parsed.record
    have = kind_of(record)
    if kind == "prompts" and not isinstance(record, TextRecord):
        if not record.prompt:
            found = "the key 'prompt' is empty, so there is nothing to answer"
            raise BadRecordError(parsed.where, found, "fill it, or leave the record out")
        return PromptRecord(record.prompt, record.domain, parsed.columns, record.rendered)
    if kind == "demonstrations" and isinstance(record, PreferenceRecord):
        return DemonstrationRecord(record.prompt, record.chosen, record.domain, record.rendered)
    if kind != have:
        keys = " or ".join(f"`{' '.join(FORMATS[name])}`" for name in _FORMATS_OF[kind])
        columns = ", ".join(parsed.columns) or "none"
        raise BadRecordError(
            parsed.where,
            f"{kind} were asked for, but the records are {have} (other columns: {columns})",
            f"give a set with {keys}, or map its columns with columns={{ours: theirs}}",
        )
    return record


_FORMATS_OF: dict[RecordKind, tuple[str, ...]] = {
    "texts": ("text",),
    "prompts": ("prompt",),
    "demonstrations": ("prompt+completion", "messages"),
    "preferences": ("prompt+chosen+rejected", "chosen+rejected"),
}


def _parse_row(
    row: Row,
    mapping: dict[str, str | None],
    where: Location,
    expected: tuple[str, bool] | None,
    *,
    rendered: bool,
) -> tuple[tuple[str, bool], ParsedRow]:
    ours = _rename(row, mapping, where)
    rendered = _parse_rendered(ours.get("rendered", rendered), where)
    if not rendered and all(is_transcript(ours.get(side)) for side in SIDES):
        ours |= {side: parse_transcript(ours[side], side, where) for side in SIDES}
    name = _checked_format(ours, row, where, expected)
    domain = ours.get("domain", "")
    if not isinstance(domain, str):
        found = f"the key 'domain' holds {describe(domain)}, expected text"
        raise BadRecordError(where, found, "write the domain's name, or leave the key out")
    record = PARSERS[name](ours, where)
    record = replace(record, domain=domain, rendered=rendered)
    conversational = not isinstance(_main_text(record), str)
    if expected is not None and conversational != expected[1]:
        styles = ("plain", "conversational")
        found = f"this record is {styles[conversational]}, the set began {styles[expected[1]]}"
        raise BadRecordError(where, f"mixed formats: {found}", "give each format a set of its own")
    return (name, conversational), ParsedRow(record, where, _other_columns(row, mapping))


def _parse_rendered(value: Any, where: Location) -> bool:
    named = {"true": True, "false": False}.get(str(value).lower())  # a CSV cell is text
    if named is None:
        found = f"the key 'rendered' holds {describe(value)}, expected true or false"
        fix = "write one of them, or hide a column of another meaning with columns={rendered: null}"
        raise BadRecordError(where, found, fix)
    return named


def _rename(row: Row, mapping: dict[str, str | None], where: Location) -> dict[str, Any]:
    """Return the row's values under our names, without the nulls that fill columnar files."""
    ours = {key: row[key] for key in KNOWN_KEYS if key in row and key not in mapping}
    for name, theirs in mapping.items():
        if theirs is None:
            continue
        if theirs not in row:
            hint = closest(theirs, row)
            meant = f"did you mean {hint!r}?" if hint else f"found {_names(row)}"
            found = f"columns maps {name!r} to the key {theirs!r}, which is missing"
            raise BadRecordError(where, found, meant)
        ours[name] = row[theirs]
    return {key: value for key, value in ours.items() if value is not None}


def _checked_format(
    ours: dict[str, Any], row: Row, where: Location, expected: tuple[str, bool] | None
) -> str:
    name = detect_format(ours)
    if expected is not None and name != expected[0]:
        missing = [key for key in FORMATS[expected[0]] if key not in ours]
        own = name is not None and all(key in ours for key in FORMATS[name])
        if missing and (not own or set(FORMATS[name or ""]) < set(FORMATS[expected[0]])):
            raise _missing(missing[0], row, where)
        found = f"mixed formats: this record reads as {name!r}, the set began as {expected[0]!r}"
        raise BadRecordError(where, found, "give each format a set of its own")
    if name is None:
        hints = [(key, closest(key, row)) for key in TEXT_KEYS]
        meant = next((f"rename {theirs!r} to {key!r}" for key, theirs in hints if theirs), "")
        formats = "; ".join(" ".join(keys) for keys in FORMATS.values())
        found = f"no known format has its keys: found {_names(row)}, expected one of: {formats}"
        fix = "map the columns with columns={ours: theirs}"
        raise BadRecordError(where, found, f"{meant}, or {fix}" if meant else fix)
    for key in FORMATS[name]:
        if key not in ours:
            raise _missing(key, row, where)
    return name


def _missing(key: str, row: Row, where: Location) -> BadRecordError:
    if key in row:
        return BadRecordError(where, f"the key {key!r} holds null", "fill it, or drop the record")
    hint = closest(key, [name for name in row if name not in KNOWN_KEYS])
    fix = f"columns={{{key}: their_name}} maps another name"
    meant = f"did you mean {hint!r}? Rename it, or pass columns={{{key}: {hint}}}" if hint else fix
    return BadRecordError(where, f"the key {key!r} is missing (found {_names(row)})", meant)


def _names(row: Row) -> str:
    names = [str(name) for name in row]
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "no keys"


def _main_text(record: Record) -> Text:
    return record.text if isinstance(record, TextRecord) else record.prompt


def _other_columns(row: Row, mapping: dict[str, str | None]) -> dict[str, str]:
    taken = {mapping.get(key, key) for key in ("prompt", "domain", "rendered")}
    return {
        str(key): value if isinstance(value, str) else json.dumps(value, default=str)
        for key, value in row.items()
        if key not in taken and value is not None
    }
