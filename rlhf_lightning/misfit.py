"""Messages about refused values: the key, what it got, what is wanted, the nearest name."""

from __future__ import annotations

import difflib
import inspect
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for the closest known words, or ""."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def nearest_path(path: Path, kind: Callable[[Path], bool] = Path.exists) -> Path | None:
    """Return the path that is most like a missing one, of which each part may be misspelt, or None.

    Args:
        path: what was given.
        kind: what the other has to be; by default it only exists.
    """
    above = path.parent if path.parent.is_dir() else nearest_path(path.parent, Path.is_dir)
    if path.exists() or above is None:
        return None
    if kind(above / path.name):
        return above / path.name
    names = [one.name for one in above.iterdir() if kind(one)]
    close = difflib.get_close_matches(path.name, names, n=1)
    return above / close[0] if close else None


def near_path(path: Path | str, kind: Callable[[Path], bool] = Path.is_dir) -> str:
    """Return "; did you mean ...?" for the `nearest_path`, or ""."""
    near = nearest_path(Path(path), kind)
    return f"; did you mean {near}?" if near else ""


def refuse_unknown(given: Mapping[str, Any], known: Collection[str], name: str, where: str) -> None:
    """Refuse arguments that a call does not take.

    Raises:
        ValueError: with the nearest ones.
    """
    for key in given:
        if key.startswith("_") or key not in known:
            taken = ", ".join(known) or "nothing"
            raise ValueError(
                f"unknown key {where}.{key}{did_you_mean(key, known)} "
                f"({name.rpartition('.')[2]} takes {taken})"
            )


def without_markers(hint: Any) -> Any:
    """Return a hint without what `Annotated` adds."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def shown(value: Any) -> str:
    """Return a value in one line, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:100]}..."


def is_union(hint: Any) -> bool:
    """Return whether a hint names alternatives."""
    return get_origin(hint) in (Union, types.UnionType)


@dataclass
class Built:
    """Placeholder for an object that a configuration will build.

    Args:
        name: dotted name of its class or function.
        product: annotation of the built object.
        is_placed: a parameter whose annotation allows it has received it.
    """

    name: str
    product: Any
    is_placed: bool = False

    def __repr__(self) -> str:
        return f"{{_target_: {self.name}}}"


def misfit(key: str, value: Any, hint: Any, error: ValidationError) -> TypeError | ValueError:
    """Return what pydantic found in one line: key, got, wanted, nearest name.

    Args:
        key: name of the value; "" for a whole configuration.
        value: value that was refused.
        hint: annotation of the value.
        error: error of pydantic for that annotation.
    """
    items = [(_inside(value, item["loc"]), item) for item in error.errors(include_url=False)]
    # A key that is mistyped explains one that is missing; else the alternative that fits so far.
    order = {"extra_forbidden": -2, "value_error": -1}
    place, found = min(
        items, key=lambda one: (order.get(one[1]["type"], 0), -len(one[0]) if key else 0)
    )
    for part in place:
        value = value[part]
    full = _joined(key, place)
    if found["type"] == "extra_forbidden":
        names = [_joined(key, (*place[:-1], name)) for name in _fields(hint, place[:-1])]
        return ValueError(f"unknown key {full}{did_you_mean(full, names)}")
    if found["type"] == "missing":
        whole = f", or choose {full.partition('.')[0]} as a whole" if place else ""
        return ValueError(f"{_joined(key, found['loc'])} is missing: set it{whole}")
    alike = [item for where, item in items if where == place]
    if len(alike) == 1 and found["type"] == "value_error":
        text = str(found["ctx"]["error"])
        return ValueError(f"{full}{text}" if text.startswith(("=", ".", "[", " ")) else text)
    return _wrong(full, value, _annotation(hint, place), alike)


def _wrong(key: str, value: Any, hint: Any, items: list[Any]) -> TypeError | ValueError:
    """Return the error of one value that fits none of its alternatives."""
    wanted = " or ".join(dict.fromkeys(_wanted(item) for item in items))
    if isinstance(value, Built):
        given = getattr(value.product, "__name__", value.product)
        return TypeError(
            f"{key}._target_={value.name} is not allowed there: it gives {given}, expected {wanted}"
        )
    if all(item["type"] in _VALUE_ERRORS for item in items):
        names = re.findall(r"'([^']*)'", wanted) if isinstance(value, str) else []
        return ValueError(f"{key}={shown(value)} must be {wanted}{did_you_mean(str(value), names)}")
    wanted += " or None" if type(None) in get_args(without_markers(hint)) else ""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", value)
    fix = " (write 1e-5 as 1.0e-5: YAML reads 1e-5 as text)" if is_number else ""
    return TypeError(f"{key}={shown(value)} is {type(value).__name__}, expected {wanted}{fix}")


def _joined(key: str, place: Iterable[int | str]) -> str:
    """Return the name of a place: of a configuration with dots, of a Python value with brackets."""
    of_configuration = not key or "." in key
    for part in place:
        dotted = of_configuration and isinstance(part, str)
        key = f"{key}.{part}".lstrip("." if not key else "") if dotted else f"{key}[{part}]"
    return key


def _wanted(item: Any) -> str:
    """Return what one alternative wants."""
    kind, context = item["type"], item.get("ctx", {})
    if kind in _SIGNS:
        bound = context[_SIGNS[kind][1]]
        return f"{_SIGNS[kind][0]} {bound if isinstance(bound, int) else format(bound, 'g')}"
    if kind == "literal_error":
        return str(context["expected"])
    text = str(context.get("error", item["msg"]))
    return _WORDS.get(kind, text.rpartition(" must be ")[2].removeprefix("Input should be "))


def _inside(value: Any, loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return the place of an error in a value, without pydantic's names of alternatives."""
    place: list[int | str] = []
    for part in loc:
        is_key = isinstance(value, Mapping) and part in value
        if is_key or (isinstance(value, list | tuple) and part in range(len(value))):
            value = value[part]  # type: ignore[index]
            place.append(part)
    return tuple(place)


def _annotation(hint: Any, place: Iterable[int | str]) -> Any:
    """Return the annotation of the value at a place; Any where it does not say."""
    for part in place:
        options = [without_markers(one) for one in (get_args(hint) if is_union(hint) else (hint,))]
        known = [*(one.model_fields[part].annotation for one in options if part in _fields(one))]
        known += [get_args(one)[-1] for one in options if get_args(one)]
        hint = without_markers(known[0]) if known else Any
    return hint


def _fields(hint: Any, place: Iterable[int | str] = ()) -> Mapping[Any, Any]:
    """Return the fields of the group of settings at a place."""
    found = _annotation(hint, place)
    options = get_args(found) if is_union(found) else (found,)
    models = (one for one in options if inspect.isclass(one) and issubclass(one, BaseModel))
    return next((one.model_fields for one in models), {})


_WORDS = {
    **dict.fromkeys(("sequence_str", "list_type", "tuple_type", "is_instance_of"), "a list"),
    **dict.fromkeys(("byte_size", "byte_size_unit"), "80GiB, 24GB or a number of bytes"),
    "model_type": "a group of settings",
    "string_unicode": "text that UTF-8 can encode",
    "path_type": "a path",
    "too_long": "fewer items",
    "too_short": "not empty",
}
_SIGNS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}
_VALUE_ERRORS = (*_SIGNS, "finite_number", "literal_error", "too_short", "value_error")
