"""Rows of JSONL, JSON, CSV, TSV, Parquet and Arrow files, each with its place in the file.

Texts are UTF-8 and may be compressed: `pairs.jsonl.gz`. A CSV file has a header, commas between
cells and quotes as `"..."`; a TSV file has tabs. An Arrow file is a stream, as `datasets` saves it.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from rlhf_lightning.data.errors import BadRecordError, Location, describe, missing_file
from rlhf_lightning.data.progress import with_progress

Row = Mapping[str, Any]
Objects = Any  # {key: Objects} of objects, [Objects] of a list with some, None of anything else
LocatedRow = tuple[Location, Row | BadRecordError]

LONGEST_CELL = 2**26  # characters; the default refuses texts over 128 kB
VALIDATION_NAMES = ("validation", "valid", "val", "dev", "test")
_SHARD = r"(-\d+-of-\d+(-[0-9a-f]{16})?)?"


class TableRow(dict[str, Any]):
    """A row of a table, where a null may fill an object that had no such key.

    Args:
        values: value of each column.
        objects: of each column the objects, with the keys whose null is fill; None where nobody
            knows, as of rows in memory.
    """

    def __init__(self, values: Row, objects: Mapping[str, Objects] | None) -> None:
        super().__init__(values)
        self.objects = objects


def rows_of(rows: Any) -> Iterator[Any]:
    """Yield the rows of a `datasets.Dataset`, or those in memory.

    What `datasets` reads from JSON has no fill.
    """
    objects: dict[str, Objects] | None = None
    if hasattr(rows, "builder_name"):
        is_json = rows.builder_name == "json"
        schema = () if is_json else rows.features.arrow_schema
        objects = {field.name: objects_in(field.type) for field in schema}
    return (TableRow(row, objects) if isinstance(row, Mapping) else row for row in rows)


def objects_in(kind: Any) -> Objects:
    """Return the objects of values of an Arrow type, whose nulls are all fill; JSON has none."""
    from pyarrow import types

    if types.is_struct(kind):
        return {field.name: objects_in(field.type) for field in kind}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inside = objects_in(kind.value_type)
        return None if inside is None else [inside]
    return None


def read_rows(path: Path) -> Iterator[LocatedRow]:
    """Yield every row of a file with its location; a line that cannot be read yields its error.

    Raises:
        MissingFileError: if there is no such file; it is a BadRecordError and a FileNotFoundError.
        BadRecordError: if the file is of an unknown extension, empty, or unreadable as a whole.
    """
    where = Location(str(path))
    if not path.exists():
        raise missing_file(where, path, "check the path")
    if not is_data_file(path):
        found = f"the extension {extension(path)!r} is unknown"
        raise BadRecordError(where, found, f"give a file that ends with one of {ENDINGS}")
    empty = True
    try:
        for place, row in with_progress(_READERS[extension(path)](path), f"reading {path}"):
            empty = False
            yield place, as_row(row, place)
    except (UnicodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        fix = "save the file as UTF-8; let the name of a compressed one end with .gz"
        raise BadRecordError(where, f"it is not UTF-8, or not whole ({error})", fix) from error
    if empty:
        raise BadRecordError(where, "the file holds no records", "give a file with a row a record")


def checked_rows(path: Path) -> Iterator[tuple[Location, Row]]:
    """Yield every row of a file with its location.

    Raises:
        BadRecordError: as `read_rows` does, and at the first line that cannot be read.
    """
    for where, row in read_rows(path):
        if isinstance(row, BadRecordError):
            raise row
        yield where, row


def extension(path: Path) -> str:
    """Return the ending that tells the format, in lower case: `.jsonl`, or `.jsonl.gz`."""
    last = path.suffix.lower()
    return Path(path.stem).suffix.lower() + last if last == ".gz" else last


def is_data_file(path: Path) -> bool:
    """Return whether `read_rows` knows the format of a file, by its name."""
    return extension(path) in _READERS


def _open(path: Path, **options: Any) -> IO[str]:
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
    return opener(path, "rt", encoding="utf-8-sig", **options)  # type: ignore[no-any-return]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("it has a key twice")
    return found


def _decode(text: str, where: Location, fix: str) -> Any:
    """Return the value that JSON spells.

    Raises:
        BadRecordError: if it is not JSON, has a key twice, is too deep, or holds too long a number.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise BadRecordError(where, f"it cannot be read as JSON ({error})", fix) from error


def as_row(row: Any, where: Location) -> Row | BadRecordError:
    """Return a row, or the error of what is none."""
    if isinstance(row, Mapping | BadRecordError):
        return row
    return BadRecordError(where, f"found {describe(row)}", 'write an object, {"prompt": ...}')


def _read_lines(path: Path) -> Iterator[LocatedRow]:
    fix = "write one JSON object a line, or let the name of a list end with .json"
    with _open(path, newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = Location(str(path), number)
                try:
                    yield where, _decode(line, where, fix)
                except BadRecordError as error:
                    yield where, error


def _read_json(path: Path) -> Iterator[LocatedRow]:
    fix = "write a list of objects; let the name of a file with one object a line end with .jsonl"
    with _open(path) as file:
        text = file.read()
    rows = _decode(text, Location(str(path)), fix) if text.strip() else []
    if not isinstance(rows, list):
        raise BadRecordError(Location(str(path)), f"found {describe(rows)}", fix)
    for number, row in enumerate(rows, start=1):
        yield Location(str(path), number, "record"), row


def _read_csv(path: Path) -> Iterator[LocatedRow]:
    csv.field_size_limit(LONGEST_CELL)
    separator = "\t" if extension(path).startswith(".tsv") else ","
    with _open(path, newline="") as file:
        reader = csv.DictReader(file, strict=True, delimiter=separator)
        try:
            names = [name.strip() for name in reader.fieldnames or ()]
            reader.fieldnames = names
            if len(set(names)) < len(names):
                found = f"the header names a column twice: {', '.join(names)}"
                raise BadRecordError(Location(str(path), 1), found, "rename or remove one")
            for row in reader:
                where = Location(str(path), reader.line_num)
                found = f"the line has another number of cells than the {len(names)} headers"
                fix = 'separate cells by commas (.tsv: tabs), and quote those with one as "..."'
                ragged = None in row or None in row.values()
                yield where, BadRecordError(where, found, fix) if ragged else row
        except csv.Error as error:
            where = Location(str(path), reader.line_num)
            fix = 'quote cells as "...", and quotes inside as ""'
            raise BadRecordError(where, f"it is not CSV: {error}", fix) from error


def _read_table(path: Path) -> Iterator[LocatedRow]:
    number = 0
    for batch in _batches(path):
        objects = {field.name: objects_in(field.type) for field in batch.schema}
        rows = batch.to_pylist()
        if any("arrow.json" in str(field.type) for field in batch.schema):
            from datasets import Features  # writes such columns, and takes seconds to import

            rows = map(Features.from_arrow_schema(batch.schema).decode_example, rows)
        for row in rows:
            number += 1
            yield Location(str(path), number, "row"), TableRow(row, objects)


def _batches(path: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow import ipc, parquet

    try:
        if extension(path) == ".parquet":
            with parquet.ParquetFile(path) as file:
                yield from file.iter_batches()
        else:
            with path.open("rb") as content:
                yield from ipc.open_stream(content)
    except pyarrow.ArrowException as error:
        found = f"it cannot be read ({' '.join(str(error).split())[:200]})"
        raise BadRecordError(Location(str(path)), found, "write it anew as Parquet") from error


_READERS: dict[str, Callable[[Path], Iterator[LocatedRow]]] = {
    ".jsonl": _read_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_table,
    ".arrow": _read_table,
}
ENDINGS = f"{', '.join(_READERS)}, or one of the texts with .gz"
_READERS |= {f"{end}.gz": read for end, read in _READERS.items() if read is not _read_table}


def split_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the train and the validation files of a folder.

    A file is `train.<ext>`, or a shard as on the hub, `train-00000-of-00002.<ext>`, in the folder
    or in its `data/`. The validation files are those of the first of `validation`, `valid`, `val`,
    `dev` and `test` that exists, and may be none.

    Raises:
        BadRecordError: if there is no train file, or another one of the same name.
    """
    where = Location(str(folder))
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        fix = "give load_from_disk(FOLDER) from Python, or write its splits by to_parquet(FILE)"
        raise BadRecordError(where, "the folder is of save_to_disk, which is not read", fix)
    files = sorted(p for place in (folder, folder / "data") for p in place.glob("*"))
    stems = {path: path.name[: -len(extension(path))] for path in files if is_data_file(path)}

    def of(name: str) -> list[Path]:
        found = [path for path, stem in stems.items() if re.fullmatch(name + _SHARD, stem)]
        shards = {extension(path) if "-of-" in path.name else path for path in found}
        counts = {int(count) for path in found for count in re.findall(r"-of-(\d+)", path.name)}
        if len(shards) > 1 or counts - {len(found)}:
            listed = ", ".join(str(path.relative_to(folder)) for path in found[:8])
            text = f"these {len(found)} files are not the shards of one set: {listed}"
            raise BadRecordError(where, text, "give all of them alone, or the file that is meant")
        return found

    train, validation = of("train"), next(filter(None, map(of, VALIDATION_NAMES)), [])
    if not train:
        listed = ", ".join(path.name for path in [*stems][:8]) or "no data files"
        fix = f"name one train.<ext> with <ext> of {ENDINGS}, or join them into one"
        raise BadRecordError(where, f"the folder has no train file, but {listed}", fix)
    return train, validation
