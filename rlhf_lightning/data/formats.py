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
`data.labels`), `rendered` (true where the texts spell special tokens that are meant as tokens), and
the columns of a conversation (`conversations.with_row_keys`). All rows of a set have one format.
Sides that are transcripts, as in Anthropic/hh-rlhf, are read as conversations unless they are
`rendered`. Source: https://huggingface.co/docs/trl/dataset_formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlhf_lightning.data.conversations import (
    ROW_KEYS,
    SIDES,
    check_characters,
    check_prompt,
    check_response,
    implied_prompt,
    is_transcript,
    messages_in,
    parse_messages,
    parse_text,
    parse_transcript,
    style,
    with_roles,
    with_row_keys,
    without_nulls,
)
from rlhf_lightning.data.errors import BadRecordError, Location, SkippedRecords, closest, describe
from rlhf_lightning.data.files import LocatedRow, Row
from rlhf_lightning.data.public_formats import PROMPTS, TEXT_KEYS, as_ours, line_for, misnamed
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    PromptRecord,
    Record,
    RecordKind,
    TextRecord,
    kind_of,
    prompt_key,
)
from rlhf_lightning.text.forms import WEIGHT

FILL = "fill it, or leave the record out"


def _parse_text_row(row: Row, where: Location) -> TextRecord:
    text = row["text"]
    if not isinstance(text, str):
        found = f"the key 'text' holds {describe(text)}, expected text"
        raise BadRecordError(where, found, "give conversations under the key 'messages'")
    if isinstance(messages_in(text, "text", where), list):
        found = f"the key 'text' holds {describe(text)}, which is JSON of messages"
        raise BadRecordError(where, found, "read it with columns={messages: text, text: null}")
    if not text.strip():
        raise BadRecordError(where, "the key 'text' is empty", FILL)
    return TextRecord(check_characters(text, "the key 'text'", where))


def _parse_prompt_row(row: Row, where: Location) -> PromptRecord:
    prompt = parse_text(row["prompt"], "prompt", where)
    check_prompt(prompt, where)
    if not prompt:
        raise BadRecordError(where, "the key 'prompt' is empty", FILL)
    return PromptRecord(prompt)


def _parse_completion_row(row: Row, where: Location) -> DemonstrationRecord:
    prompt = parse_text(row["prompt"], "prompt", where)
    completion = parse_text(row["completion"], "completion", where)
    check_prompt(prompt, where)
    check_response(prompt, completion, "completion", where)
    return DemonstrationRecord(prompt, completion)


def _parse_messages_row(row: Row, where: Location) -> DemonstrationRecord:
    messages = parse_messages(row["messages"], "messages", where)
    roles = [message["role"] for message in messages]
    if roles[-1] != "assistant" or "user" not in roles:
        found = f"'messages' are from {', '.join(roles)}, expected 'user' and at last 'assistant'"
        raise BadRecordError(where, found, "end with the response, or give it as 'prompt' only")
    learnt = [i for i, m in enumerate(messages) if roles[i] == "assistant" and m.get(WEIGHT) != 0]
    last = learnt[-1] if learnt else len(messages) - 1
    prompt, answer = messages[:last], messages[last : last + 1]  # what is behind is not learnt
    check_response(prompt, answer, "messages", where)
    return DemonstrationRecord(prompt, answer)


def _parse_preference_row(row: Row, where: Location) -> PreferenceRecord:
    chosen, rejected = (parse_text(row[side], side, where) for side in SIDES)
    if chosen == rejected:
        found = f"'chosen' and 'rejected' are the same: {describe(row['chosen'])}"
        raise BadRecordError(where, found, "leave the pair out: it says nothing")
    given = parse_text(row["prompt"], "prompt", where) if "prompt" in row else None
    prompt, chosen, rejected = implied_prompt(given, chosen, rejected, where)
    check_prompt(prompt, where)
    check_response(prompt, chosen, "chosen", where)
    check_response(prompt, rejected, "rejected", where)
    return PreferenceRecord(prompt, chosen, rejected, margin=_parse_margin(row, where))


def _parse_margin(row: Row, where: Location) -> float | None:
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


PARSERS: dict[str, Callable[[Row, Location], Record]] = {
    "text": _parse_text_row,
    "prompt": _parse_prompt_row,
    "prompt+completion": _parse_completion_row,
    "messages": _parse_messages_row,
    "prompt+chosen+rejected": _parse_preference_row,
    "chosen+rejected": _parse_preference_row,
}
FORMATS = {name: tuple(name.split("+")) for name in PARSERS}
_FORMATS_OF: dict[RecordKind, tuple[str, ...]] = {
    "texts": ("text",),
    "prompts": ("prompt",),
    "demonstrations": ("prompt+completion", "messages"),
    "preferences": ("prompt+chosen+rejected", "chosen+rejected"),
}
MAPPING = "columns={ours: theirs} (in Python FileSource(path, columns=...))"
_OTHER_NAMES = {  # of columns that are read only where they are mapped
    "prompt": (*PROMPTS, "problem", "user", "human", "source"),
    "completion": ("answer", "response", "output", "solution", "assistant", "gpt", "target"),
}
_QUIET = ("domain", "margin", "rendered")
KNOWN_KEYS = (*TEXT_KEYS, *_QUIET, "label", *ROW_KEYS)
_EMPTY = ("None", "", "[]", "{}", "nan")


@dataclass(frozen=True)
class ParsedRow:
    """A record, where it was read, and the row's other columns in their own types.

    Rows of one `group` are on one side of a split; "" stands for the prompt. `texts` are both sides
    of a plain pair as given, where the prompt is what they share; `unread` names the
    columns that no record has, the label of a response among them.
    """

    record: Record
    where: Location
    columns: Mapping[str, Any]
    group: str = ""
    texts: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def split_key(self) -> str:
        """The text by which the row is split."""
        return self.group or prompt_key(self.record)


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


def parse_rows(
    rows: Iterable[LocatedRow], parse: Callable[[Row, Location], ParsedRow], skipped: SkippedRecords
) -> list[ParsedRow]:
    """Return the records of one set.

    Args:
        rows: rows with their locations, or errors in place of rows.
        parse: makes a record of a row, such as a `RowParser`.
        skipped: raises at a bad record or notes it.

    Raises:
        BadRecordError: for a bad record (unless skipped), and if no record is left.
    """
    parsed: list[ParsedRow] = []
    where = Location("the source")
    num_before = len(skipped.messages)  # of the other split of the source
    for where, row in rows:
        try:
            if isinstance(row, BadRecordError):
                raise row
            parsed.append(parse(row, where))
        except BadRecordError as error:
            skipped.add(error)
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
    demonstration from a preference (its chosen response).

    Raises:
        BadRecordError: if the record cannot be turned into that kind, naming both.
    """
    record = parsed.record
    more: dict[str, Any] = {"variables": record.variables, "origin": record.origin}
    if kind == "prompts" and not isinstance(record, TextRecord):
        if not record.prompt:
            raise BadRecordError(parsed.where, "the key 'prompt' is empty", FILL)
        return PromptRecord(record.prompt, record.domain, parsed.columns, record.rendered, **more)
    if kind == "demonstrations" and isinstance(record, PreferenceRecord):
        given = (record.prompt, record.chosen, record.domain, record.rendered)
        return DemonstrationRecord(*given, **more)
    if kind != kind_of(record):
        keys = " or ".join(f"`{' '.join(FORMATS[name])}`" for name in _FORMATS_OF[kind])
        columns = ", ".join(parsed.columns) or "none"
        raise BadRecordError(
            parsed.where,
            f"{kind} were asked for, but the records are {kind_of(record)} "
            f"(other columns: {columns})",
            line_for(parsed.columns)
            or f"give a set with {keys}, or map its columns with {MAPPING}",
        )
    return record


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
        self._columns = check_columns(columns)
        self._rendered = rendered
        self._began: tuple[str, str] | None = None  # format and style of the first good row

    def __call__(self, row: Row, where: Location) -> ParsedRow:
        """Return the record of a row.

        Raises:
            BadRecordError: if it has none, or is of another format than the first.
        """
        row = {k: None if type(v).__name__ in ("NAType", "NaTType") else v for k, v in row.items()}
        if not any(self._columns.get(key) for key in TEXT_KEYS):
            hidden = self._columns.keys() & set(TEXT_KEYS)
            row = as_ours({k: v for k, v in row.items() if k not in hidden}, where)
            if line := misnamed(row):
                raise BadRecordError(where, f"these are no keys of ours: {_names(row)}", line)
        given = self._rename(row, where)
        ours = self._values(given, where)
        name = self._format(ours, row, where)
        self._check_implied_prompt(name, ours, row, where)
        record = replace(
            PARSERS[name](ours, where), domain=ours.get("domain", ""), rendered=ours["rendered"]
        )
        record, used = with_row_keys(record, ours, where)
        own = style(record.text if isinstance(record, TextRecord) else record.prompt)
        if self._began is not None and own != self._began[1]:
            found = f"mixed formats: this record is {own}, the set began {self._began[1]}"
            raise BadRecordError(where, found, "give each format a set of its own")
        self._began = (name, own)
        quiet = {self._columns.get(key, key) for key in ("prompt", "domain", "rendered")}
        read = {self._columns.get(key, key) for key in (*FORMATS[name], *_QUIET, *used)}
        sides = tuple(ours[side] for side in SIDES) if name == "chosen+rejected" else ()
        return ParsedRow(
            record,
            where,
            {str(k): v for k, v in row.items() if k not in quiet and v is not None},
            texts=sides if all(isinstance(side, str) for side in sides) else (),
            unread=tuple(str(k) for k in row if k not in read and str(row[k]) not in _EMPTY),
        )

    def _rename(self, row: Row, where: Location) -> dict[str, Any]:
        """Return the row's values under our names, without the nulls that fill columnar files."""
        ours = {key: row[key] for key in KNOWN_KEYS if key in row and key not in self._columns}
        for name, theirs in self._columns.items():
            if theirs is None:
                continue
            if theirs not in row:
                hint = closest(theirs, row)
                meant = f"did you mean {hint!r}?" if hint else f"found {_names(row)}"
                found = f"columns maps {name!r} to the key {theirs!r}, which is missing"
                raise BadRecordError(where, found, meant)
            ours[name] = row[theirs]
        return {key: value for key, value in ours.items() if value is not None}

    def _values(self, given: dict[str, Any], where: Location) -> dict[str, Any]:
        """Return the values with the messages that cells and transcripts spell."""
        ours: dict[str, Any] = without_nulls(given) if where.unit == "row" else given.copy()
        rendered = str(ours.get("rendered", self._rendered)).lower()  # a CSV cell is text
        if rendered not in ("true", "false"):
            found = f"the key 'rendered' holds {describe(given['rendered'])}"
            fix = "write true or false, or hide the column with columns={rendered: null}"
            raise BadRecordError(where, found, fix)
        if not isinstance(domain := ours.get("domain", ""), str):
            found = f"the key 'domain' holds {describe(domain)}, expected text"
            raise BadRecordError(where, found, "write the domain's name, or leave the key out")
        ours["rendered"] = rendered == "true"
        if ours["rendered"]:
            return ours
        cell = ours.get("completion")
        for key in TEXT_KEYS[1:]:
            if key in ours:
                ours[key] = with_roles(messages_in(ours[key], key, where))
        if isinstance(ours.get("prompt"), str) and isinstance(cell, str):  # it may ask for JSON
            messages = ours["completion"]
            if not isinstance(messages, str) and [m["role"] for m in messages] != ["assistant"]:
                ours["completion"] = cell
        if all(is_transcript(ours.get(side)) for side in SIDES):
            ours |= {side: parse_transcript(ours[side], side, where) for side in SIDES}
        return ours

    def _check_implied_prompt(self, name: str, ours: Row, row: Row, where: Location) -> None:
        if name != "chosen+rejected" or "prompt" in self._columns or ours["rendered"]:
            return
        other = next((key for key in PROMPTS if isinstance(row.get(key), str)), None)
        if other is not None and isinstance(ours["chosen"], str):
            fix = f"read it with columns={{prompt: {other}}}, or let both sides repeat their prompt"
            found = f"the pair has no key 'prompt', but a column {other!r}"
            raise BadRecordError(where, found, f"{fix} and set columns={{prompt: null}}")

    def _format(self, ours: dict[str, Any], row: Row, where: Location) -> str:
        name = detect_format(ours)
        if name is None and self._began is None:
            # "context" is no misspelled "text".
            hints = ((key, closest(key, row, cutoff=0.75)) for key in TEXT_KEYS)
            meant = next((f"rename {near!r} to {key!r}, or " for key, near in hints if near), "")
            formats = "; ".join(" ".join(keys) for keys in FORMATS.values())
            found = f"no known format has its keys: found {_names(row)}, expected one of: {formats}"
            raise BadRecordError(where, found, line_for(row) or f"{meant}map them: {_mapping(row)}")
        began = name if self._began is None else self._began[0]
        own = name is not None and all(key in ours for key in FORMATS[name])
        missing = [key for key in FORMATS[began or ""] if key not in ours]
        if missing and (not own or set(FORMATS[name or ""]) < set(FORMATS[began or ""])):
            raise _missing(missing[0], row, where)
        if name != began:
            found = f"mixed formats: this record reads as {name!r}, the set began as {began!r}"
            raise BadRecordError(where, found, "put each format into a separate set")
        return name or ""


def _mapping(row: Row) -> str:
    """Return how the columns are mapped, with the row's own names where they say what they are."""
    found = {
        ours: next((name for name in row if str(name).lower() in names), None)
        for ours, names in _OTHER_NAMES.items()
    }
    if found["prompt"] is None:
        return MAPPING
    return MAPPING.replace("ours: theirs", ", ".join(f"{k}: {v}" for k, v in found.items() if v))


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
