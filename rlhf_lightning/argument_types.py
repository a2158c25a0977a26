"""Whether a plain value of a configuration fits the annotation of the argument that it becomes."""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

_SEQUENCES: tuple[type, ...] = (
    *(list, tuple, set, frozenset),
    *(collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection),
)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_PLAIN = (int, float, str, bool, type(None))


def fits(value: Any, hint: Any) -> bool:
    """Return whether a plain value may be given for `hint`.

    What a configuration builds first (a mapping with `_target_`) fits everything, and so does a
    value of a type that plain values do not have.
    """
    if isinstance(value, Mapping) and "_target_" in value:
        return True
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in arguments)
    if origin is Literal:
        return value in arguments
    kind = origin or hint
    if kind in _SEQUENCES:
        return isinstance(value, list | tuple) and _items_fit(value, arguments)
    if kind in _MAPPINGS:
        inside = arguments[1] if len(arguments) == 2 else Any
        return isinstance(value, Mapping) and all(fits(item, inside) for item in value.values())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is Path:
        return isinstance(value, str)
    if hint is None:
        return value is None
    if hint in _PLAIN:
        return isinstance(value, hint)
    return hint is Any or not isinstance(value, _PLAIN) or _is_open(hint)


def type_name(hint: Any) -> str:
    """Return an annotation in words: `int or None`, `one of 'a', 'b'`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(option) for option in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    kind = origin or hint
    if kind in _SEQUENCES:
        return "a list"
    if kind in _MAPPINGS:
        return "a mapping"
    if hint in (None, type(None)):
        return "null"
    if hint is Path:
        return "a path"
    return str(getattr(hint, "__name__", hint))


def _items_fit(value: list[Any] | tuple[Any, ...], arguments: tuple[Any, ...]) -> bool:
    kinds = [argument for argument in arguments if argument is not Ellipsis]
    if len(kinds) != 1:
        return True
    return all(fits(item, kinds[0]) for item in value)


def _is_open(hint: Any) -> bool:
    # A type variable, or an alias that only its own code can judge.
    return isinstance(hint, typing.TypeVar | str)
