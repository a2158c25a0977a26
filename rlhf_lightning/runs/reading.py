"""Files of run and model folders, which may come from someone else, and the JSON in them."""

from __future__ import annotations

import functools
import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
MOST_BYTES = 2**31
MOST_LEVELS = 50


def read_file(path: Path, *, most: int = MOST_BYTES, follow: bool = False) -> bytes:
    """Return the content of a file.

    Args:
        path: a regular file; nothing is read from a pipe or a device.
        most: largest size in bytes.
        follow: follow links, as in the hub's cache.

    Raises:
        ValueError: for a link, another thing than a file, or one that is too large.
        OSError: if it cannot be read.
    """
    if path.is_symlink() and not follow:
        raise ValueError(f"{path} is a link: put a copy of what it names in its place")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)  # `open` refuses a folder, and would leave it open
        raise ValueError(f"{path} is no file: remove it")
    with open(descriptor, "rb") as file:
        if found.st_size > most:
            raise ValueError(f"{path} is larger than {most // 2**20} MiB: remove it")
        return file.read()


def read_json(path: Path) -> Any:
    """Return the JSON of a file.

    Raises:
        ValueError: if it is none, or nested too deep; see `read_file` too.
        OSError: if it cannot be read.
    """
    return loads(read_file(path, follow=True))


def loads(content: bytes) -> Any:
    """Return what JSON says.

    Raises:
        ValueError: if it is none, or nested deeper than `MOST_LEVELS`.
    """
    try:
        found = json.loads(content)
        opened = content.count(b"[") + content.count(b"{")
        if opened <= MOST_LEVELS or _levels(found) <= MOST_LEVELS:
            return found
    except RecursionError:
        pass
    raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")


def _levels(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_levels, inside), default=0) if isinstance(value, dict | list) else 0


def parse(kind: type[T], text: str | bytes) -> T:
    """Return the dataclass that `text` is the JSON of; keys that it does not have are left out.

    Raises:
        ValueError: in one line, if a field is missing or of another type.
    """
    from pydantic import ValidationError  # here: keeps config errors fast

    try:
        found: T = _adapter(kind).validate_json(text)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from error
    return found


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
