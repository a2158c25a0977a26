"""JSON read back into the dataclass that it was written from, with the types of its fields."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")


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
