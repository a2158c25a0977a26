"""Append-only journals of JSON Lines: appended items are on disk, and a kill leaves whole lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from rlhf_lightning.data.errors import Location
from rlhf_lightning.preferences.records import LabRecord, RecordT, from_row, to_row
from rlhf_lightning.runs.atomic import sync_folder, write_text

ItemT = TypeVar("ItemT")


class Journal(Generic[ItemT]):
    """A JSON Lines file that survives a kill during a write.

    A line that a kill cut short is not read, and is dropped before something is appended to the
    file, so that what follows does not stick to it; reading changes nothing. A batch is on disk
    when `append` returns; a batch that was being written may be there in part.

    Args:
        path: path of the file; need not exist.
        write: one item to plain JSON values.
        read: inverse of `write`.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        write: Callable[[ItemT], Mapping[str, Any]],
        read: Callable[[Mapping[str, Any], Location], ItemT],
    ) -> None:
        self.path = Path(path)
        self._write = write
        self._read = read
        self._is_whole = False

    def append(self, items: Iterable[ItemT]) -> None:
        """Write the items and wait until they are on disk."""
        lines = [
            json.dumps(self._write(item), ensure_ascii=False, allow_nan=False) for item in items
        ]
        if not lines:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._is_whole:
            _drop_torn_line(self.path)
            self._is_whole = True
        new = not self.path.exists()
        text = "".join(line + "\n" for line in lines)
        with self.path.open("ab") as file:
            # JSON escapes what UTF-8 does not have, a lone surrogate, in the same way.
            file.write(text.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_folder(self.path.parent)

    def read(self) -> list[ItemT]:
        """Return the items in the order in which they were appended; a missing file has none.

        Raises:
            BadRecordError: for a line that is not what was written.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]
        located = ((Location(str(self.path), n), line) for n, line in enumerate(lines, start=1))
        return [self._read(json.loads(line), where) for where, line in located]


def record_journal(cls: type[RecordT], path: Path | str) -> Journal[RecordT]:
    """Return the journal of candidates, pairs or labels."""
    return Journal(path, write=to_row, read=lambda row, where: from_row(cls, row, where))


def write_records(path: Path | str, records: Iterable[LabRecord]) -> None:
    """Write the records as JSON Lines in one step."""
    write_rows(path, (to_row(record) for record in records))


def write_rows(path: Path | str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write plain JSON values, one a line, in one step."""
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    write_text(Path(path), "".join(lines))


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            file.flush()
            os.fsync(file.fileno())
