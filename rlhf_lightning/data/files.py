"""Rows out of JSONL, JSON, CSV, TSV, Parquet and Arrow files, each with its place in the file.

The text formats may be compressed: `pairs.jsonl.gz` is read as `pairs.jsonl` is. Compression,
encoding and separator, and whether JSON has a line a row, are detected from the content, not from
the name.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, AnyStr

from rlhf_lightning.data.errors import BadRecordError, Location, MissingFileError, closest, describe
from rlhf_lightning.data.progress import with_progress

Row = Mapping[str, Any]
LocatedRow = tuple[Location, Row | BadRecordError]

LONGEST_ROW = 2**26  # bytes or signs: a compressed file of a megabyte may hold one of gigabytes
LARGEST_JSON = 2**32  # bytes of a file that is read as a whole
LONGEST_TEXT = 2**24  # characters of a row: of 100 million a tokenizer ends the process
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
SEPARATORS = ",;\t|"
_WRAPPERS = ("data", "rows", "records", "examples", "instances", "items", "samples", "train")
PATTERN = "a pattern is not read: give the folder, if its files are numbered shards, or join them"
_PEEKED_ROWS = 20  # lines of CSV that tell what separates cells
_PEEKED = 4096  # bytes, behind whose white space the content begins


def read_rows(path: Path) -> Iterator[LocatedRow]:
    """Yield every row of a file with its location; a line that cannot be read yields its error.

    Raises:
        MissingFileError: if there is no such file; it is a BadRecordError and a FileNotFoundError.
        BadRecordError: if the file is of an unknown extension, empty, or unreadable as a whole.
    """
    where = Location(str(path))
    if not path.exists():
        similar = closest(path.name, [p.name for p in path.parent.glob("*")])
        hint = f"did you mean {path.parent / similar}?" if similar else "check the path"
        hint = PATTERN if set("*?[") & set(path.name) else hint
        raise MissingFileError(where, "there is no such file or folder", hint)
    reader = _READERS.get(extension(path))
    if reader is None:
        raise BadRecordError(
            where,
            f"the extension {extension(path)!r} is unknown",
            f"give a file that ends with one of {ENDINGS}",
        )
    empty = True
    try:
        for place, row in with_progress(reader(path), f"reading {path}"):
            empty = False
            if (length := _characters(row)) > LONGEST_TEXT:
                found = f"it has {length} characters, more than {LONGEST_TEXT}"
                row = BadRecordError(place, found, "split it, or take it out")
            yield place, row
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk
        found = f"it is not a whole compressed file ({error})"
        raise BadRecordError(where, found, "compress it anew, or give the plain file") from error
    except UnicodeError as error:
        found = f"it is not UTF-8 ({getattr(error, 'reason', error)})"
        raise BadRecordError(where, found, "save the file as UTF-8") from error
    if empty:
        raise BadRecordError(where, "the file holds no records", "give a file with a row a record")


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, Mapping) else value
    return sum(map(_characters, inner)) if isinstance(value, Mapping | list) else 0


def checked_rows(path: Path) -> Iterator[tuple[Location, Row]]:
    """Yield every row of a file with its location.

    Raises:
        BadRecordError: as `read_rows` does, and at the first line that cannot be read.
    """
    for where, row in read_rows(path):
        if isinstance(row, BadRecordError):
            raise row
        yield where, row


def rereadable(files: list[Path]) -> list[Path]:
    """Return files that are there to be read more than once, as data is.

    Raises:
        BadRecordError: if one is a pipe, a device or a folder.
    """
    for file in files:
        if file.exists() and not file.is_file():
            found = "it is a pipe, a device or a folder, and data is read more than once"
            fix = "write it to a file (.jsonl.gz is read as it is), and give that"
            raise BadRecordError(Location(str(file)), found, fix)
    return files


def extension(path: Path) -> str:
    """Return the ending that tells the format, in lower case: `.jsonl`, or `.jsonl.gz`."""
    last = path.suffix.lower()
    return Path(path.stem).suffix.lower() + last if last in COMPRESSED else last


def is_data_file(path: Path) -> bool:
    """Return whether `read_rows` knows the format of a file, by its name."""
    return extension(path) in _READERS


def _zstd(file: IO[bytes]) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(file, "zstd")


_DECOMPRESS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": _zstd,
}
# How files of other formats begin, what they are, and what to do.
_FOREIGN: dict[bytes, tuple[str, str]] = {
    b"PK\x03\x04": (
        "an Excel workbook or another zip archive",
        "save it as CSV UTF-8, or unpack it",
    ),
    b"\xd0\xcf\x11\xe0": ("an Excel workbook of the old form", "save it as CSV UTF-8"),
    b"PAR1": ("a Parquet file", "let its name end with .parquet"),
    b"ARROW1": ("an Arrow file", "let its name end with .arrow"),
    b"version https://git-lfs": ("a pointer of Git LFS and no data", "fetch it by git lfs pull"),
    b"<!DOCTYPE": ("a web page", "download the dataset's file itself"),
    b"<html": ("a web page", "download the dataset's file itself"),
}


class _AsLongAsItWas(io.FileIO):
    """A file to the length that it had when it was opened, so that one that grows has an end."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        opened = os.fstat(self.fileno())
        self._left = opened.st_size if stat.S_ISREG(opened.st_mode) else sys.maxsize

    def readinto(self, buffer: Any) -> int:
        """Read no further than to that length."""
        read = super().readinto(memoryview(buffer)[: self._left]) or 0
        self._left -= read
        return read

    def readall(self) -> bytes:
        """Read all up to that length."""
        return b"".join(iter(lambda: self._piece(), b""))

    def _piece(self) -> bytes:
        piece = bytearray(min(self._left, 2**20))
        return bytes(piece[: self.readinto(piece)])


def _open(path: Path) -> io.BufferedReader:
    """Return the content, decompressed; a pipe will do.

    Raises:
        BadRecordError: if it begins as a file of another format.
    """
    file: Any = io.BufferedReader(_AsLongAsItWas(path))
    head = file.peek(_PEEKED)
    for magic, decompress in _DECOMPRESS.items():
        if head.startswith(magic):
            file = io.BufferedReader(decompress(file))
            head = file.peek(_PEEKED)
    for magic, (found, fix) in _FOREIGN.items():
        if head.startswith(magic):
            file.close()
            raise BadRecordError(Location(str(path)), f"it is {found}", fix)
    return file  # type: ignore[no-any-return]


def _encoding(file: io.BufferedReader) -> str:
    """Return the Unicode encoding by the first bytes: that of a byte order mark, or UTF-8."""
    name = json.detect_encoding(file.peek(_PEEKED)[:4])
    return "utf-8-sig" if name == "utf-8" else name


def _read_lines(lines: Iterable[bytes], path: Path) -> Iterator[LocatedRow]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = Location(str(path), number)
            try:
                row = _decode(_decode_text(line, where), where, "write one JSON object a line")
            except BadRecordError as error:
                yield where, error
            else:
                yield where, _as_object(row, where)


class _RepeatedKey(dict[str, Any]):
    """An object in which, or inside of which, a key is given twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    repeats = len(found) < len(pairs) or any(map(_repeats, found.values()))
    return _RepeatedKey(found) if repeats else found


def _repeats(value: Any) -> bool:
    return isinstance(value, _RepeatedKey) or (
        isinstance(value, list) and any(map(_repeats, value))
    )


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _decode(text: str, where: Location, fix: str) -> Any:
    """Return the value that JSON spells.

    Raises:
        BadRecordError: if it is not JSON, too deep, or holds too long a number.
    """
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if where.number is None else ""
        found = f"it is not JSON: {error.msg} at {line}column {error.colno}"
        raise BadRecordError(where, found, fix) from error
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        found = "is nested too deeply" if deep else f"holds a number that is too long ({error})"
        fix = "write texts, plain numbers and lists of messages only"
        raise BadRecordError(where, f"it {found}", fix) from error


def _decode_text(content: bytes, where: Location, encoding: str = "utf-8-sig") -> str:
    try:
        return str(content, encoding)
    except UnicodeDecodeError as error:
        found = f"it is not UTF-8 ({error.reason})"
        raise BadRecordError(where, found, "save the file as UTF-8") from error


def _as_object(row: Any, where: Location) -> Row | BadRecordError:
    if _repeats(row):
        return BadRecordError(where, "it has a key twice", "write each key once in an object")
    if isinstance(row, Mapping):
        return row
    return BadRecordError(where, f"found {describe(row)}", 'write an object, {"prompt": ...}')


def _read_json(path: Path) -> Iterator[LocatedRow]:
    where = Location(str(path))
    with _open(path) as file:
        encoding = _encoding(file)
        begins = str(file.peek(_PEEKED)[:_PEEKED], encoding, "ignore").lstrip()[:1]
        if begins != "[" and extension(path).startswith(".jsonl"):
            utf8 = encoding == "utf-8-sig"
            given = _bounded(file, path) if utf8 else _as_utf8(file, encoding, path)
            yield from _read_lines(given, path)
            return
        content = file.read(LARGEST_JSON)
    if len(content) == LARGEST_JSON:
        found = f"it holds {LARGEST_JSON} bytes or more"
        raise BadRecordError(where, found, "write JSON Lines, which are read a row at a time")
    text = _decode_text(content, where, encoding)
    try:
        rows = _decode(text, where, "write a list of objects") if text.strip() else []
    except BadRecordError:
        lines = text.encode().splitlines()
        first = next(_read_lines(lines, path))[1]
        if isinstance(first, BadRecordError) and not extension(path).startswith(".jsonl"):
            raise  # it is no JSON Lines either
        yield from _read_lines(lines, path)
        return
    rows = _list_inside(rows)
    if not isinstance(rows, list):
        fix = 'write a list of objects (pandas does with to_json(path, orient="records"))'
        raise BadRecordError(where, f"found {describe(rows)}", fix)
    for number, row in enumerate(rows, start=1):
        located = Location(str(path), number, "record")
        yield located, _as_object(row, located)


def _list_inside(value: Any) -> Any:
    """Return the rows of `{"version": 1, "data": [...]}`, where no other list is beside them."""
    lists = [k for k, v in value.items() if isinstance(v, list)] if isinstance(value, dict) else ()
    return value[lists[0]] if len(lists) == 1 and lists[0] in _WRAPPERS else value


def _as_utf8(file: IO[bytes], encoding: str, path: Path) -> Iterator[bytes]:
    text = io.TextIOWrapper(file, encoding=encoding)
    return (line.encode() for line in _bounded(text, path))


def _bounded(file: IO[AnyStr], path: Path) -> Iterator[AnyStr]:
    """Yield the lines of a file.

    Raises:
        BadRecordError: at one that is too long to be a row.
    """
    number = 0
    while line := file.readline(LONGEST_ROW):
        number += 1
        if len(line) == LONGEST_ROW:
            found = f"the line has {LONGEST_ROW} characters or more"
            raise BadRecordError(Location(str(path), number), found, "cut it, or take the row out")
        yield line


def _read_csv(path: Path) -> Iterator[LocatedRow]:
    csv.field_size_limit(LONGEST_ROW)  # the default refuses texts over 128 kB
    where = Location(str(path))
    with _open(path) as content:
        file = io.TextIOWrapper(content, newline="", encoding=_encoding(content))
        lines = _bounded(file, path)
        header = next(lines, "")
        named = re.fullmatch(r"sep=(.)\s*", header, re.IGNORECASE)  # Excel's own
        skipped = 1 if named else 0
        header = next(lines, "") if named else header
        if re.match(r"\s*(\[\s*)?\{\s*\"", header):
            raise BadRecordError(where, "it begins as JSON does", "let its name end with .jsonl")
        signs = [named[1]] if named else _separators(header, extension(path))
        peeked = [header, *itertools.islice(lines, _PEEKED_ROWS if len(signs) > 1 else 0)]
        separator = next((sign for sign in signs if _fits(sign, peeked)), signs[0])
        reader = csv.DictReader(itertools.chain(peeked, lines), strict=True, delimiter=separator)
        try:
            names = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
            if twice := [name for name in names if names.count(name) > 1]:
                found = f"the header names the column {twice[0]!r} twice"
                raise BadRecordError(where, found, "rename one of them, or take it out")
            for row in reader:
                located = Location(str(path), reader.line_num + skipped)
                yield located, _check_cells(row, located, separator)
        except csv.Error as error:
            located = Location(str(path), reader.line_num + skipped)
            fix = 'quote cells with separators or line breaks as "...", quotes inside as ""'
            raise BadRecordError(located, f"it is not CSV: {error}", fix) from error


def _separators(header: str, ending: str) -> list[str]:
    """Return what may separate the names of a header: first the comma, then the most frequent."""
    bare = re.sub(r'"[^"]*"', "", header)
    usual = "\t" if ending.startswith(".tsv") else ","
    signs = sorted(SEPARATORS, key=lambda sign: (sign != usual, -bare.count(sign)))
    return [sign for sign in signs if sign in bare] or [","]


def _fits(separator: str, lines: list[str]) -> bool:
    """Return whether all rows have as many cells as the first; the last one may be cut."""
    reader = csv.reader(lines, strict=True, delimiter=separator)
    counts: set[int] = set()
    try:
        counts.update(len(row) for row in reader if row)
    except csv.Error:
        counts |= set() if reader.line_num == len(lines) else {0, 1}
    return len(counts) == 1


def _check_cells(row: dict[Any, Any], where: Location, separator: str) -> Row | BadRecordError:
    too_many = None in row
    if too_many or None in row.values():
        wanted = len(row) - (1 if too_many else 0)
        more = "more" if too_many else "fewer"
        found = f"the line has {more} cells than the {wanted} headers, separated by {separator!r}"
        return BadRecordError(where, found, "quote cells that hold it, and fill empty ones")
    return row


def _read_columns(path: Path) -> Iterator[LocatedRow]:
    import pyarrow

    kind = "a Parquet" if extension(path) == ".parquet" else "an Arrow"
    number = 0
    try:
        for batch in batches(path):
            for row in batch.to_pylist():
                number += 1
                yield Location(str(path), number, "row"), row
    except (pyarrow.ArrowException, OSError) as error:  # while it is opened, or in its middle
        found = f"it is not {kind} file ({' '.join(str(error).split())[:200]})"
        raise BadRecordError(Location(str(path)), found, "write it anew") from error


def batches(path: Path) -> Iterator[Any]:
    """Yield the batches of a Parquet file, or of an Arrow file or stream."""
    from pyarrow import ipc, parquet

    if extension(path) == ".parquet":
        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches()
        return
    with path.open("rb") as content:
        is_stream = content.read(6) != b"ARROW1"  # as `datasets` saves it
        content.seek(0)
        if is_stream:
            yield from ipc.open_stream(content)
        else:
            file = ipc.open_file(content)
            yield from map(file.get_batch, range(file.num_record_batches))


_READERS: dict[str, Callable[[Path], Iterator[LocatedRow]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_columns,
    ".arrow": _read_columns,
    ".feather": _read_columns,
}
ENDINGS = f"{', '.join(_READERS)}, or one of these texts with {', '.join(COMPRESSED)}"
_READERS |= {
    text + ending: reader
    for text, reader in _READERS.items()
    for ending in COMPRESSED
    if reader is not _read_columns
}
