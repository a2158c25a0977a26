"""Pairs and labels in and out of files, in our own records and in the formats of others.

| format         | file                  | holds                                                   |
|----------------|-----------------------|---------------------------------------------------------|
| `pairs`        | JSON Lines            | `Pair` records                                          |
| `labels`       | JSON Lines            | `Label` records; their pairs are known already          |
| `trl`          | JSON Lines            | `prompt chosen rejected`, with or without chat messages |
| `label_studio` | JSON, a list          | tasks with `Pairwise` annotations                       |
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from rlhf_lightning.data.errors import BadRecordError, Location
from rlhf_lightning.data.files import Row, checked_rows
from rlhf_lightning.preferences.formats.tools import read_tool, write_labels, write_verdict
from rlhf_lightning.preferences.records import KnownChoice, Label, Pair, from_row, to_row
from rlhf_lightning.runs.atomic import write_text

Format = Literal["pairs", "labels", "trl", "label_studio"]
Known = Literal["labels", "gold", "ignore"]
Level = Literal["aggregated", "raw"]
Method = Literal["people_first", "majority", "dawid_skene"]
FORMATS: tuple[str, ...] = get_args(Format)
# A key that tells a format; the first that fits decides.
_TELLING: tuple[tuple[str, Format], ...] = (
    ("choice", "labels"),
    ("first", "pairs"),
    ("chosen", "trl"),
    ("rejected", "trl"),
    ("data", "label_studio"),
)


@dataclass(frozen=True)
class Collection:
    """Pairs, labels of these or of known pairs, and how many labels of the file were dropped."""

    pairs: tuple[Pair, ...]
    labels: tuple[Label, ...]
    dropped: int = 0


@dataclass(frozen=True)
class Written:
    """The number of rows of a file, and of the verdicts it has no words for, by kind."""

    rows: int
    left_out: Counter[str]


def read_collection(
    path: Path, *, format: Literal["auto"] | Format, known: Known, now: str
) -> Collection:
    """Return the pairs and labels of a file.

    Args:
        path: file to read.
        format: `auto` detects it from the keys of the first row.
        known: what becomes of labels in the file: kept, made into gold questions where they agree,
            or left out.
        now: ISO time of labels that have none.

    Raises:
        BadRecordError: with file and line, for what cannot be read.
    """
    rows = checked_rows(path)
    first = next(rows)
    name = detect_format(*first) if format == "auto" else format
    rows = itertools.chain([first], rows)
    pairs: Iterable[Pair] = ()
    labels: Iterable[Label] = ()
    if name == "pairs":
        pairs = [from_row(Pair, row, where) for where, row in rows]
    elif name == "labels":
        labels = [from_row(Label, row, where) for where, row in rows]
    else:
        pairs, labels = read_tool(name, rows, source=path.name, now=now)
    found = Collection(tuple({p.pair_id: p for p in pairs}.values()), tuple(labels))
    if known == "labels" or name == "labels":
        return found
    gold = unanimous(found.labels) if known == "gold" else {}
    asked = (replace(pair, gold=gold.get(pair.pair_id, pair.gold)) for pair in found.pairs)
    used = sum(label.pair_id in gold for label in found.labels)
    return Collection(tuple(asked), (), len(found.labels) - used)


def unanimous(labels: Iterable[Label]) -> dict[str, KnownChoice]:
    """Return the choices on which all labels of a pair agree, by pair; a skip says nothing."""
    said: defaultdict[str, set[KnownChoice]] = defaultdict(set)
    for label in labels:
        if label.choice != "skip":
            said[label.pair_id].add(label.choice)
    return {pair_id: next(iter(found)) for pair_id, found in said.items() if len(found) == 1}


def write_collection(
    path: Path,
    found: Collection,
    *,
    format: Format,
    level: Level,
    method: Method = "people_first",
) -> Written:
    """Write pairs and labels to a file, whole or not at all.

    Args:
        path: file to write.
        found: pairs and labels.
        format: format of the file. `pairs` writes all pairs and no label.
        level: one verdict a pair, or every label.
        method: rule by which votes become a verdict, see `aggregate`.

    Raises:
        ValueError: if the format has no place for it.
    """
    left_out: Counter[str] = Counter()
    if format == "pairs":
        rows: list[Any] = [to_row(pair) for pair in found.pairs]
    elif format == "labels":
        if level == "aggregated":
            raise ValueError(
                "format=labels holds labels of single annotators: use labels=raw, or another format"
            )
        rows = [to_row(label) for label in found.labels]
    elif level == "raw":
        labels: dict[str, list[Label]] = {pair.pair_id: [] for pair in found.pairs}
        for label in found.labels:
            labels[label.pair_id].append(label)
        asked = ((pair, labels[pair.pair_id]) for pair in found.pairs)
        rows = [row for p, given in asked for row in write_labels(format, p, given, left_out)]
    else:
        # Brings torch with it, which neither serving nor reading needs.
        from rlhf_lightning.preferences.aggregate import aggregate

        people = {label.annotator for label in found.labels if label.kind == "person"}
        rows = []
        for verdict in aggregate(found.pairs, found.labels, people=people, method=method):
            rows += write_verdict(format, verdict, left_out)
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]
    as_list = format == "label_studio"
    text = "[\n" + ",\n".join(lines) + "\n]\n" if as_list else "".join(f"{x}\n" for x in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return Written(len(rows), left_out)


def detect_format(where: Location, row: Row) -> Format:
    """Return the format that the keys of a row speak of.

    Raises:
        BadRecordError: if they speak of none.
    """
    for key, name in _TELLING:
        if key in row:
            return name
    raise BadRecordError(
        where,
        f"the keys {', '.join(map(str, row)) or '(none)'} tell no format",
        f"give format=, one of {', '.join(FORMATS)}, or rename the keys",
    )
