"""Candidates, pairs and labels as rows of JSON Lines, both ways."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from rlhf_lightning.data.errors import BadRecordError, Location, closest
from rlhf_lightning.data.files import read_rows
from rlhf_lightning.preferences.records import Candidate, Label, LabError, LabRecord, Pair

RecordT = TypeVar("RecordT", Candidate, Pair, Label)


def to_row(record: LabRecord) -> dict[str, Any]:
    """Return the record as plain JSON values; keys that hold None are left out."""
    return {key: value for key, value in asdict(record).items() if value is not None}


def to_line(record: LabRecord) -> str:
    """Return the record as one line of JSON, line break included."""
    return json.dumps(to_row(record), ensure_ascii=False, allow_nan=False) + "\n"


def from_row(cls: type[RecordT], row: Mapping[str, Any], where: Location) -> RecordT:
    """Return the record of a row.

    Raises:
        BadRecordError: with the place, for an unknown or missing key or a value that cannot be.
    """
    known = {item.name: item for item in fields(cls)}
    for key in row:
        if key not in known:
            hint = closest(str(key), known)
            meant = f"did you mean {hint!r}" if hint else "leave it out"
            raise BadRecordError(where, f"{cls.__name__} has no key {key!r}", meant)
    for key, item in known.items():
        if key not in row and item.default is MISSING:
            found = f"{cls.__name__} lacks the key {key!r}"
            raise BadRecordError(where, found, f"its keys are {', '.join(known)}")
    try:
        return cls(**row)
    except LabError as error:
        raise BadRecordError(where, str(error), "mend the value, or leave the line out") from error


def read_records(cls: type[RecordT], path: str | Path) -> Iterator[RecordT]:
    """Yield the records of a JSON Lines file (or .json, .csv, .parquet) in its order.

    Raises:
        BadRecordError: for a file or a line that cannot be read.
    """
    for where, row in read_rows(Path(path)):
        if isinstance(row, BadRecordError):
            raise row
        yield from_row(cls, row, where)


def unique(records: Iterable[RecordT]) -> list[RecordT]:
    """Return the records without those whose name came before; of labels, annotator and pair."""
    seen: dict[object, RecordT] = {}
    for record in records:
        seen.setdefault(_identity(record), record)
    return list(seen.values())


def _identity(record: LabRecord) -> object:
    if isinstance(record, Candidate):
        return record.response_id
    return record.pair_id if isinstance(record, Pair) else (record.pair_id, record.annotator)
