"""Errors of bad records: the place, the fault and the fix."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_lightning.misfit import nearest_path
from rlhf_lightning.text.messages import BadValueError

OnBadRecord = Literal["raise", "skip"]
LONGEST_QUOTE = 60


@dataclass(frozen=True)
class Location:
    """The place of a record: a file or dataset, and the number of its line, row or record."""

    source: str
    number: int | None = None
    unit: str = "line"

    def __str__(self) -> str:
        """Return e.g. `pairs.jsonl, line 3`."""
        return self.source if self.number is None else f"{self.source}, {self.unit} {self.number}"


class BadRecordError(ValueError):
    """A record, or a whole file, that cannot be used.

    Args:
        where: the place, file and line.
        found: what is wrong there, with the key and the value that was found.
        fix: how to mend it.
    """

    def __init__(self, where: Location, found: str, fix: str) -> None:
        """Note the place, the fault and the fix."""
        super().__init__(where, found, fix)
        self.where = where

    def __str__(self) -> str:
        """Return `where: found. Fix: fix.`, in one line that UTF-8 can hold."""
        text = "{}: {}. Fix: {}".format(*self.args)
        text = text.replace("\r", "\\r").replace("\n", "\\n")
        text += "" if text.endswith("?") else "."
        # A key of a JSON object may hold half of a character, which no log file takes.
        return text.encode("utf-8", "backslashreplace").decode()


class MissingFileError(BadRecordError, FileNotFoundError):
    """A file or folder of records that does not exist."""


def missing_file(where: Location, path: Path, fix: str) -> MissingFileError:
    """Return the error of a path that does not exist, with the one most like it or else `fix`."""
    near = nearest_path(path)
    fix = f"did you mean {near}?" if near else fix
    return MissingFileError(where, "there is no such file or folder", fix)


def closest(name: str, names: Iterable[str], *, cutoff: float = 0.7) -> str | None:
    """Return the one of `names` that `name` most looks like, None if none does."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return found[0] if found else None


def wrong_value(key: str, value: Any, wanted: str, fix: str) -> BadValueError:
    """Return the error of a key that holds something else than what is wanted."""
    return BadValueError(f"the key {key!r} holds {describe(value)}, expected {wanted}", fix)


def describe(value: Any) -> str:
    """Return a value in a few words, as an error names what was found."""
    if value is None:
        return "null"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    short = text if len(text) <= LONGEST_QUOTE else text[:LONGEST_QUOTE] + "..."
    names = {dict: "an object", list: "a list", tuple: "a list", bool: "a truth value"}
    if isinstance(value, str):
        return f"the text {short!r}"
    return f"{names.get(type(value), 'the number')} {short}"
