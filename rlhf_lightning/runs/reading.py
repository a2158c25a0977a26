"""JSON and YAML of run and model folders, read as data."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
# Reads ten times as fast where PyYAML was built with libyaml.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_json(path: Path) -> Any:
    """Return the JSON of a file.

    Raises:
        ValueError: if it is none.
        OSError: if it cannot be read.
    """
    return json.loads(path.read_bytes())


def read_yaml(path: Path) -> Any:
    """Return the YAML of a file: plain values, never objects.

    Raises:
        ValueError: if it is none.
        OSError: if it cannot be read.
    """
    try:
        return _LOADER(path.read_text("utf-8")).get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


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
