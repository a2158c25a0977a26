"""The allowlist of names that a configuration may build, and the check of their arguments.

A `_target_` is a class or a function that is defined where it is looked up: in the parts of this
package that are made to be configured, or a class of an allowed library. What a module merely
imported (`rlhf_lightning.app.train.os.system`), what starts with an underscore, and functions of
libraries, which load pickles and run code, cannot be reached.
"""

from __future__ import annotations

import collections.abc
import difflib
import importlib
import inspect
import os
import pkgutil
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Union, get_args, get_origin

from rlhf_lightning.hparams import is_number

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


OWN = "rlhf_lightning"
# Not `runs`, which writes files, nor the entry points, which start processes.
OWN_PARTS = (
    "hparams",
    "models",
    "data",
    "rollout",
    "modules",
    "preferences",
    "evaluation",
    "doctor",
    "callbacks",
)
LIBRARIES = ("lightning", "torch.optim", "torch.nn", "transformers", "peft", "torchmetrics")
# Of a library only these, by the name of a base class: not, say, Lightning's command line.
BASES = frozenset(
    {
        "Module",
        "Optimizer",
        "LRScheduler",
        "Callback",
        "Logger",
        "Profiler",
        "PreTrainedConfig",
        "PretrainedConfig",
        "PreTrainedTokenizerBase",
        "PeftConfigMixin",
    }
)
ALLOWED = (*(f"{OWN}.{part}" for part in OWN_PARTS), *LIBRARIES)
# They return what `path` names without calling it.
LOOKUPS = ("hydra.utils.get_method", "hydra.utils.get_class", "hydra.utils.get_object")
MOST_LISTED = 15  # names in a message
OTHER_WORDS = {"world": "dataset"}  # that difflib does not find alike
SPECIAL = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_")


class TargetError(ValueError):
    """A configuration names something that it may not build, or arguments that it does not take."""


def trusted_targets() -> tuple[str, ...]:
    """Return the prefixes of `_target_` that the user trusts besides ours."""
    return tuple(filter(None, os.environ.get("RLHF_ALLOWED_TARGETS", "").split(",")))


def did_you_mean(word: str, known: list[str]) -> str:
    """Return "; did you mean ...?" for the closest known words, or ""."""
    first, dot, rest = word.partition(".")
    word = f"{OTHER_WORDS.get(first, first)}{dot}{rest}"
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def listed(known: list[str]) -> str:
    """Return names for a message; of a long list, such as the experiments, the plain ones."""
    if len(known) <= MOST_LISTED:
        return ", ".join(known)
    plain = [name for name in known if "_" not in name] or known[:MOST_LISTED]
    return f"{', '.join(plain)}, ... ({len(known)} in all: rlhf-train --help)"


def targets(node: Any, where: str = "") -> Iterator[tuple[str, str, Mapping[Any, Any]]]:
    """Yield place, dotted name and node of everything that is built or looked up by name.

    Args:
        node: plain dicts and lists.
        where: its place.
    """
    if isinstance(node, Mapping):
        if "_target_" in node:
            target = node["_target_"]
            yield where, str(node.get("path") if target in LOOKUPS else target), node
        for key, value in node.items():
            yield from targets(value, f"{where}.{key}" if where else str(key))
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from targets(value, f"{where}[{index}]")


def check_names(container: Any, trusted: tuple[str, ...] = ()) -> None:
    """Refuse names that are not below an allowed package; imports nothing.

    Args:
        container: the configuration as plain dicts and lists.
        trusted: further prefixes, that the user lists.

    Raises:
        TargetError: with the place, the name and what is allowed.
    """
    for where, name, _ in targets(container):
        private = any(part.startswith("_") for part in name.split("."))
        spelt = all(part.isidentifier() for part in name.split("."))
        below = any(name.startswith(f"{package}.") for package in ALLOWED)
        if not spelt or not (name.startswith(trusted or ("\0",)) or (below and not private)):
            raise TargetError(_refusal(where, name))


def check_targets(container: Any, trusted: tuple[str, ...] = ()) -> None:
    """Look every name up, and hold its arguments against its signature; imports what is named.

    Args:
        container: the configuration as plain dicts and lists.
        trusted: further prefixes, that the user lists.

    Raises:
        TargetError: with the place, what it got and what it wants.
    """
    check_names(container, trusted)
    for where, name, node in targets(container):
        found = resolve(name, where, trusted)
        if node["_target_"] in LOOKUPS:
            _check_lookup(node, where)
        else:
            check_arguments(found, {str(k): v for k, v in node.items()}, where)


def _check_lookup(node: Mapping[Any, Any], where: str) -> None:
    for key in node:
        if key not in SPECIAL and key != "path":
            raise TargetError(
                f"unknown key {where}.{key}{did_you_mean(str(key), ['path'])} "
                f"({node['_target_']} takes path)"
            )


def resolve(name: str, where: str, trusted: tuple[str, ...] = ()) -> Any:
    """Return the class or function of that name if it is defined where an allowed one is.

    Raises:
        TargetError: if there is none, or if it is something that was only imported there.
    """
    root, *rest = name.split(".")
    is_trusted = name.startswith(trusted or ("\0",))
    packages = (root,) if is_trusted else ALLOWED
    found: Any = _module(root, where, name)
    path = root
    for part in rest:
        path = f"{path}.{part}"
        child = getattr(found, part, None)
        if child is None and hasattr(found, "__path__"):
            child = _module(path, where, name)
        if child is None:
            known = [item for item in dir(found) if not item.startswith("_")]
            raise TargetError(
                f"{where}._target_={name}: no {part} there{did_you_mean(part, known)}"
            )
        if isinstance(child, ModuleType) and child.__name__.partition(".")[0] != root:
            raise TargetError(_refusal(where, name, f"{path} is the module {child.__name__}"))
        found = child
    home = str(getattr(found, "__module__", ""))
    allowed = any(home == package or home.startswith(f"{package}.") for package in packages)
    is_function = inspect.isroutine(found)
    if not allowed or not (inspect.isclass(found) or is_function):
        raise TargetError(_refusal(where, name, f"it is {_what(found)}"))
    if home.partition(".")[0] != OWN and not is_trusted:
        bases = {base.__name__ for base in inspect.getmro(found)} if not is_function else set()
        if not bases & BASES:
            raise TargetError(_refusal(where, name, f"it is {_what(found)}"))
    return found


def check_arguments(found: Any, node: Mapping[str, Any], where: str) -> None:
    """Hold the arguments of a node against the signature of what it builds.

    Raises:
        TargetError: for an unknown one, one that is not set, or one of another type; the last
            only for our own classes and functions.
    """
    given = {key: value for key, value in node.items() if key not in SPECIAL}
    for key, value in given.items():
        if value == "???":
            raise TargetError(f"{where}.{key} is not set: add {where}.{key}=...")
    try:
        parameters = inspect.signature(found).parameters
    except (ValueError, TypeError):  # written in C, without a signature
        return
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key in given:
            if key not in parameters:
                raise TargetError(
                    f"unknown key {where}.{key}{did_you_mean(key, list(parameters))} "
                    f"({found.__name__} takes {', '.join(p for p in parameters if p != 'self')})"
                )
    if str(found.__module__).partition(".")[0] != OWN:
        return
    for key, hint in _hints(found).items():
        if key in given and not fits(given[key], hint):
            value = given[key]
            number = " (write 1e-5 as 1.0e-5: YAML reads 1e-5 as text)"
            raise TargetError(
                f"{where}.{key}={value!r} is {type(value).__name__}, expected {type_name(hint)}"
                + (number if isinstance(value, str) and is_number(value) else "")
            )


def _hints(found: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(found.__init__ if inspect.isclass(found) else found)
    except (NameError, TypeError, AttributeError):  # names that only a type checker sees
        return {}


def _module(path: str, where: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ImportError as error:
        package, _, last = path.rpartition(".")
        folder = getattr(sys.modules.get(package), "__path__", [])
        known = [module.name for module in pkgutil.iter_modules(folder)]
        raise TargetError(
            f"{where}._target_={name} cannot be imported: {error}{did_you_mean(last, known)}"
        ) from error


def _what(found: Any) -> str:
    home, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    kind = "class" if inspect.isclass(found) else "function" if inspect.isroutine(found) else ""
    return f"the {kind} {home}.{name}" if kind else f"no class or function, but {type(found)}"


def _refusal(where: str, name: str, reason: str = "") -> str:
    why = f" ({reason})" if reason else ""
    return (
        f"{where}._target_={name} is not allowed{why}; allowed are classes and functions of "
        f"{OWN} ({', '.join(OWN_PARTS)}), modules, optimizers, callbacks and the like of "
        f"{', '.join(LIBRARIES)}, and what RLHF_ALLOWED_TARGETS lists (prefixes, separated by "
        "commas)"
    )
