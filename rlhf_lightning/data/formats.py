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
`Labels`), `rendered` (true where the texts spell special tokens that are meant as tokens), and
the columns of a conversation (`conversations.with_row_keys`). All rows of a set have one format.
Sides that are transcripts, as in Anthropic/hh-rlhf, are read as conversations unless they are
`rendered`. Source: https://huggingface.co/docs/trl/dataset_formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_lightning.data.conversations import (
    ROW_KEYS,
    SIDES,
    check_characters,
    check_response,
    implied_prompt,
    is_transcript,
    messages_in,
    parse_messages,
    parse_text,
    parse_transcript,
    style,
    with_row_keys,
    without_nulls,
)
from rlhf_lightning.data.errors import (
    BadRecordError,
    Location,
    SkippedRecords,
    closest,
    describe,
    wrong_value,
)
from rlhf_lightning.data.files import LocatedRow, Row
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
    DemonstrationRecord,
    Origin,
    PreferenceRecord,
    PromptRecord,
    Record,
    RecordKind,
    TextRecord,
    UnpairedRecord,
    both_responses,
    kind_of,
)
from rlhf_lightning.text.messages import WEIGHT

FILL = "fill it, or leave the record out"
_PAIRS = ("prompt+chosen+rejected", "chosen+rejected")
_NAMES = ("text", "prompt", "prompt+completion", "messages", *_PAIRS)
FORMATS = {name: tuple(name.split("+")) for name in _NAMES}
_QUIET = ("domain", "margin", "rendered")
KNOWN_KEYS = (*TEXT_KEYS, *_QUIET, "label", *ROW_KEYS)
_EMPTY = ("None", "", "[]", "{}", "nan")


# -- records -----------------------------------------------------------------------------------


def _record(name: str, row: Row, where: Location) -> Record:
    """Return the record of a row of a format."""
    if name == "text":
        return _text_record(row["text"], where)
    if name == "messages":
        return _conversation(row, where)
    texts = [parse_text(row[key], key, where) for key in FORMATS[name]]
    record: Record
    if name == "prompt":
        if not texts[0]:
            raise BadRecordError(where, "the key 'prompt' is empty", FILL)
        record = PromptRecord(texts[0])
    elif name == "prompt+completion":
        record = DemonstrationRecord(texts[0], texts[1])
    else:
        *given, chosen, rejected = texts
        if chosen == rejected:
            found = f"'chosen' and 'rejected' are the same: {describe(row['chosen'])}"
            raise BadRecordError(where, found, "leave the pair out: it says nothing")
        parts = implied_prompt(given[0] if given else None, chosen, rejected, where)
        record = PreferenceRecord(*parts, margin=_margin(row.get("margin"), where))
    if not isinstance(record.prompt, str) and [m["role"] for m in record.prompt[-1:]] == [
        "assistant"
    ]:
        found = "the last message of 'prompt' is from 'assistant', which leaves nothing to answer"
        raise BadRecordError(where, found, "end the prompt with a message from 'user'")
    for key in ("completion", *SIDES):
        if key in FORMATS[name]:
            check_response(record.prompt, getattr(record, key), key, where)
    return record


def _text_record(text: Any, where: Location) -> TextRecord:
    if not isinstance(messages_in(text, "text", where), str):
        fix = "give conversations under the key 'messages', or "
        raise wrong_value(where, "text", text, "text", fix + "columns={messages: text, text: null}")
    if not text.strip():
        raise BadRecordError(where, "the key 'text' is empty", FILL)
    return TextRecord(check_characters(text, "the key 'text'", where))


def _conversation(row: Row, where: Location) -> DemonstrationRecord:
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


def _margin(value: Any, where: Location) -> float | None:
    if value is None or value == "":
        return None
    try:
        # A CSV cell is text, and a truth value is an int to Python.
        margin = math.nan if isinstance(value, bool | list | dict) else float(value)
    except (ValueError, OverflowError):  # a whole number of 400 digits is no float
        margin = math.nan
    if not 0 <= margin < math.inf:
        fix = "swap the sides of a negative one, or leave the key out"
        raise wrong_value(where, "margin", value, "a finite number >= 0", fix)
    return margin


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
    rows: Iterable[LocatedRow], parse: Callable[[Row, Location], Record], skipped: SkippedRecords
) -> list[Record]:
    """Return the records of one set.

    Args:
        rows: rows with their locations, or errors in place of rows.
        parse: makes a record of a row, such as a `RowParser`.
        skipped: raises at a bad record or notes it.

    Raises:
        BadRecordError: for a bad record (unless skipped), and if no record is left.
    """
    records: list[Record] = []
    where = Location("the source")
    num_before = len(skipped.messages)  # of the other split of the source
    for where, row in rows:
        try:
            if isinstance(row, BadRecordError):
                raise row
            records.append(parse(row, where))
        except BadRecordError as error:
            skipped.add(error)
    skipped.log(where.source, len(records))
    if not records:
        bad = skipped.messages[num_before:] or ["the source is empty"]
        found = f"no record is left: all {len(skipped.messages) - num_before} were bad"
        raise BadRecordError(Location(where.source), found, f"mend them; the first: {bad[0]}")
    return records


def to_kind(record: Record, kind: RecordKind) -> Record:
    """Return a record as one of the wanted kind.

    A prompt may be taken from any record that has one (its row's other columns go with it), a
    demonstration from a preference (its chosen response).

    Raises:
        BadRecordError: if the record cannot be turned into that kind, naming both.
    """
    columns = record.origin.columns
    more: dict[str, Any] = {"variables": record.variables, "origin": record.origin}
    if kind == "prompts" and not isinstance(record, TextRecord):
        if not record.prompt:
            raise BadRecordError(record.place, "the key 'prompt' is empty", FILL)
        return PromptRecord(record.prompt, record.domain, columns, record.rendered, **more)
    if kind == "demonstrations" and isinstance(record, PreferenceRecord):
        given = (record.prompt, record.chosen, record.domain, record.rendered)
        return DemonstrationRecord(*given, **more)
    if kind != kind_of(record):
        found = f"{kind} were asked for, but the records are {kind_of(record)}"
        found += f" (other columns: {', '.join(columns) or 'none'})"
        fix = f"map columns with {mapping_of(columns)} to one of {_formats()}"
        raise BadRecordError(record.place, found, f"{fix}, or {pair_of(columns)}")
    return record


def _formats() -> str:
    return "; ".join(" ".join(keys) for keys in FORMATS.values())


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
        row = {k: None if type(v).__name__ in ("NAType", "NaTType") else v for k, v in row.items()}
        if not any(self._columns.get(key) for key in TEXT_KEYS):
            hidden = self._columns.keys() & set(TEXT_KEYS)
            row = as_ours({k: v for k, v in row.items() if k not in hidden}, where)
            if line := misnamed(row):
                raise BadRecordError(where, f"these are no keys of ours: {names_in(row)}", line)
        ours = self._values(self._rename(row, where), where)
        name = self._format(ours, row, where)
        record = replace(
            _record(name, ours, where), domain=ours.get("domain", ""), rendered=ours["rendered"]
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
        origin = Origin(
            where,
            columns={str(k): v for k, v in row.items() if k not in quiet and v is not None},
            unread=tuple(str(k) for k in row if k not in read and str(row[k]) not in _EMPTY),
            sides=sides if all(isinstance(side, str) for side in sides) else (),
        )
        return replace(record, origin=origin)

    def _rename(self, row: Row, where: Location) -> dict[str, Any]:
        """Return the row's values under our names, without the nulls that fill columnar files."""
        ours = {key: row[key] for key in KNOWN_KEYS if key in row and key not in self._columns}
        for name, theirs in self._columns.items():
            if theirs is not None and theirs not in row:
                hint = closest(theirs, row)
                meant = f"did you mean {hint!r}?" if hint else f"found {names_in(row)}"
                found = f"columns maps {name!r} to the key {theirs!r}, which is missing"
                raise BadRecordError(where, found, meant)
            ours[name] = None if theirs is None else row[theirs]
        return {key: value for key, value in ours.items() if value is not None}

    def _values(self, given: dict[str, Any], where: Location) -> dict[str, Any]:
        """Return the values with the messages that cells and transcripts spell."""
        ours: dict[str, Any] = without_nulls(given) if where.unit == "row" else given.copy()
        rendered = str(ours.get("rendered", self._rendered)).lower()  # a CSV cell is text
        if rendered not in ("true", "false"):
            fix = "write one of them, or hide the column with columns={rendered: null}"
            raise wrong_value(where, "rendered", given["rendered"], "true or false", fix)
        if not isinstance(domain := ours.get("domain", ""), str):
            raise wrong_value(where, "domain", domain, "text", "write a name, or leave it out")
        ours["rendered"] = rendered == "true"
        if ours["rendered"]:
            return ours
        cell = ours.get("completion")
        for key in TEXT_KEYS[1:]:
            if key in ours:
                ours[key] = messages_in(ours[key], key, where)
        if isinstance(ours.get("prompt"), str) and isinstance(cell, str):  # it may ask for JSON
            said = ours["completion"]
            roles = () if isinstance(said, str) else [m.get("role", m.get("from")) for m in said]
            if roles != ["assistant"]:
                ours["completion"] = cell
        if all(is_transcript(ours.get(side)) for side in SIDES):
            ours |= {side: parse_transcript(ours[side], side, where) for side in SIDES}
        return ours

    def _format(self, ours: dict[str, Any], row: Row, where: Location) -> str:
        name = detect_format(ours)
        began = self._began[0] if self._began else name
        if began is None:
            # "context" is no misspelled "text".
            hints = ((key, closest(key, row, cutoff=0.75)) for key in TEXT_KEYS)
            meant = next((f"rename {near!r} to {key!r}, or " for key, near in hints if near), "")
            found = f"no known format has its keys: found {names_in(row)}, expected {_formats()}"
            fix = f"{meant}map them with {mapping_of(row)}, or {pair_of(row)}"
            raise BadRecordError(where, found, fix)
        missing = next((key for key in FORMATS[began] if key not in ours), None)
        if missing and set(FORMATS[name] if name else ()) <= set(FORMATS[began]):
            raise _missing(missing, row, where)
        if name != began:
            found = f"mixed formats: this record reads as {name!r}, the set began as {began!r}"
            raise BadRecordError(where, found, "put each format into a separate set")
        other = next((key for key in PROMPTS if isinstance(row.get(key), str)), None)
        alone = name == "chosen+rejected" and "prompt" not in self._columns
        if other and alone and isinstance(ours["chosen"], str) and not ours["rendered"]:
            fix = f"read it with columns={{prompt: {other}}}, or let both sides repeat their prompt"
            found = f"the pair has no key 'prompt', but a column {other!r}"
            raise BadRecordError(where, found, f"{fix} and set columns={{prompt: null}}")
        return began


def _missing(key: str, row: Row, where: Location) -> BadRecordError:
    if key in row:
        return BadRecordError(where, f"the key {key!r} holds null", "fill it, or drop the record")
    hint = closest(key, [name for name in row if name not in KNOWN_KEYS])
    meant = f"did you mean {hint!r}? Rename it, or pass " if hint else "pass "
    found = f"the key {key!r} is missing (found {names_in(row)})"
    return BadRecordError(where, found, f"{meant}columns={{{key}: {hint or 'their_name'}}}")


# -- labels ------------------------------------------------------------------------------------

Value = str | int | float | bool
EVERY = "learn all rows alike with columns={label: null}"
GOOD = (
    "name the value of good responses with dataset.source.label_good=VALUE (in Python "
    f"label_good=VALUE), or {EVERY}"
)
_TRUTH = {"true": True, "false": False}


@dataclass(frozen=True)
class Labels:
    """Labels of a set: true where a response is good, or one value where it is `label_good`.

    Args:
        column: name of the column; None where no row has one.
        good: the value that says that a response is good; None for true.
    """

    column: str | None
    good: Value | None = None

    @classmethod
    def of_records(
        cls,
        records: Sequence[Record],
        columns: Mapping[str, str | None],
        good: Value | None,
        names_of: Callable[[str], Sequence[str]],
    ) -> Labels:
        """Return the labels of a set: those of its column `label`, or of the one mapped to it.

        Raises:
            BadRecordError: if no label is `good`, or the labels are the numbers of a `ClassLabel`,
                whose names say which are good.
        """
        labels = cls(columns.get("label", "label"), good)
        shown = (record for record in records if isinstance(record, DemonstrationRecord))
        first = next((record for record in shown if labels._value(record) is not None), None)
        if labels.column is None or first is None:
            return cls(None)
        if good is None and (names := names_of(labels.column)):
            listed = ", ".join(f"{number} {name!r}" for number, name in enumerate(names[:4]))
            found = f"the label {labels.column!r} holds the names {listed} (ClassLabel)"
            raise BadRecordError(first.place, found, GOOD)
        if good is not None and not any(map(labels._is_good, records)):
            fix = f"give a value that it has, such as {labels._value(first)!r}"
            found = f"no label {labels.column!r} is label_good={good!r}"
            raise BadRecordError(first.place, found, fix)
        return labels

    def _value(self, record: Record) -> Any:
        return None if self.column is None else record.origin.columns.get(self.column)

    def _is_good(self, record: Record) -> bool | None:
        """Return whether the response of a demonstration is good; None without a label.

        Raises:
            BadRecordError: if the label says neither.
        """
        value = self._value(record)
        if value is None or value == "":
            return None
        if self.good is not None:
            return str(value) == str(self.good)
        if (known := _TRUTH.get(str(value).lower())) is not None:
            return known
        found = f"the label {self.column!r} holds {describe(value)}, expected true or false"
        raise BadRecordError(record.place, found, GOOD)

    def unread(self, record: Record) -> tuple[str, ...]:
        """Return the columns that neither a record nor its label has."""
        return tuple(key for key in record.origin.unread if key != self.column)

    def records(self, record: Record, kind: RecordKind) -> Sequence[Record]:
        """Return a record as records of a kind: a pair is two unpaired ones.

        Raises:
            BadRecordError: if its response is to be imitated and labelled bad, or not at all in a
                labelled set; if an unpaired row has no label; or as `to_kind`.
        """
        if kind == "unpaired" and isinstance(record, PreferenceRecord):
            return both_responses(record)
        if kind == "unpaired":
            good = self._is_good(record)
            if good is None or not isinstance(record, DemonstrationRecord):
                found = f"the row has no label (other columns: {', '.join(record.origin.columns)})"
                fix = "give prompt, completion and label, or map one with columns={label: theirs}"
                raise BadRecordError(record.place, found, fix)
            parts = (record.prompt, record.completion, record.domain, record.rendered, good)
            return [UnpairedRecord(*parts, variables=record.variables, origin=record.origin)]
        is_shown = kind == "demonstrations" and isinstance(record, DemonstrationRecord)
        if is_shown and self.column is not None and not self._is_good(record):
            found = f"the label {self.column!r} holds {describe(self._value(record))}"
            fix = "leave such rows out with dataset.source.on_bad_record=skip, learn from both "
            raise BadRecordError(
                record.place, found, f"{fix} labels with +experiment=kto, or {EVERY}"
            )
        return [to_kind(record, kind)]

    def check_unread(self, records: Sequence[Record]) -> None:
        """Check that no unread column of demonstrations may be a label.

        Raises:
            BadRecordError: for a column of true and false.
        """
        shown = [record for record in records if isinstance(record, DemonstrationRecord)]
        for key in dict.fromkeys(key for record in shown for key in self.unread(record)):
            having = [record.origin for record in shown if key in record.origin.unread]
            if {str(origin.columns.get(key)).lower() for origin in having} == set(_TRUTH):
                text = f"the column {key!r} holds true and false, and is not read"
                fix = f"if true says that a response is good set columns={{label: {key}}}, else "
                raise BadRecordError(shown[0].place, text, fix + EVERY)
