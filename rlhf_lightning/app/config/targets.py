"""The calls that a configuration describes: nodes with `_target_`, checked by annotations.

A node is a call by keyword of a class or a function. It may stand only where the parameter that
receives it is annotated with what the call gives: a `Scorer` where a scorer belongs. Its own
arguments are held against its own annotations in the same way, before anything is called.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, Self, get_args

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.arguments import NamedAgain, annotations_of, fitting
from rlhf_lightning.misfit import Built, did_you_mean, refuse_unknown

OWN = "rlhf_lightning"
LIBRARIES = ("lightning", "torch", "transformers", "peft", "torchmetrics")  # classes of them
_ROOTS = tuple(f"{root}." for root in (OWN, *LIBRARIES))
_NAME = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+")


class TargetError(ConfigError):
    """A configuration names something that it may not build, or arguments that it does not take."""


def trusted_targets() -> tuple[str, ...]:
    """Return the further prefixes of `_target_` that the user trusts."""
    return tuple(filter(None, os.environ.get("RLHF_ALLOWED_TARGETS", "").split(",")))


class Kind(NamedTuple):
    """The kind of object that a place of the configuration takes.

    Args:
        name: dotted name of a class, a protocol or an alias.
        given_later: where it is partial, the arguments that the run gives.
    """

    name: str
    given_later: tuple[str, ...] = ()

    def hint(self) -> Any:
        """Return the annotation; imports it."""
        module, _, name = self.name.rpartition(".")
        found = getattr(importlib.import_module(module), name)
        return Callable[..., found] if self.given_later else found


@dataclass(repr=False)
class Node(Built):
    """A call that a configuration describes: checked here, executed by `make`.

    Args:
        call: the class or function.
        arguments: arguments by name, some of them nodes.
        is_partial: further arguments come later.
        where: place in the configuration.
        named_again: its arguments that run code or send data away, by their places.
    """

    call: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)
    is_partial: bool = False
    where: str = ""
    named_again: dict[str, Any] = field(default_factory=dict)

    @property
    def is_itself(self) -> bool:
        """True for a function that is the value: a partial one without arguments."""
        return self.is_partial and not self.arguments and inspect.isfunction(self.call)

    def make(self, **more: Any) -> Any:
        """Make the call, and those of the nodes in its arguments."""
        given = made(self.arguments) | more
        if self.is_itself and not more:
            return self.call
        return functools.partial(self.call, **given) if self.is_partial else self.call(**given)


def made(value: Any) -> Any:
    """Return a value, with what its nodes describe in their places."""
    if isinstance(value, Node):
        return value.make()
    if isinstance(value, Mapping):
        return {key: made(inside) for key, inside in value.items()}
    return [made(inside) for inside in value] if isinstance(value, list | tuple) else value


def nodes(value: Any) -> Iterator[Node]:
    """Yield a node and all below it."""
    if isinstance(value, Node):
        yield value
        value = value.arguments
    if isinstance(value, Mapping | list | tuple):
        for inside in value.values() if isinstance(value, Mapping) else value:
            yield from nodes(inside)


def read_node(value: Mapping[str, Any], kind: Kind, where: str) -> Node:
    """Return the call that a node describes; imports what it names, and calls nothing.

    Args:
        value: node as plain dicts and lists.
        kind: kind of object that its place takes.
        where: place in the configuration.

    Raises:
        TargetError: for a wrong kind of object, and for unknown or wrong arguments: with the place,
            the value and what is allowed.
    """
    for key in kind.given_later:
        if key in value:
            raise TargetError(f"{where}.{key} is given by the run: leave it out")
    node, hint = _read(value, where), kind.hint()
    with _refusing():
        _place(where, node, hint)
    return node


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Say of what is refused inside that it is of the configuration."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise TargetError(str(error)) from None


def _read(value: Any, where: str) -> Any:
    """Return a value in which each mapping with `_target_` is a node."""
    if isinstance(value, list | tuple):
        return [_read(inside, f"{where}[{index}]") for index, inside in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    given = {str(key): _read(inside, f"{where}.{key}") for key, inside in value.items()}
    if "_target_" not in given:
        return given
    name, partial = str(given.pop("_target_")), given.pop("_partial_", False)
    found, trusted = resolve(name, where), name.startswith(trusted_targets())
    returns = found if inspect.isclass(found) else annotations_of(found).get("return")
    if returns in (None, Any):  # a function that does not say what it returns
        returns = Any if trusted else type(None)
    if returns is Self:  # of a class method
        returns = found.__self__
    product = Callable[..., returns] if partial is True else returns
    node = Node(name, product, False, found, given, partial is True, where)
    with _refusing():
        _check_arguments(node, where)
    return node


def _check_arguments(node: Node, where: str) -> None:
    """Hold the arguments of a node against the annotations of what it calls, and its `Hparams`."""
    hints, is_open = parameters(node.call)
    refuse_unknown(node.arguments, node.arguments if is_open else hints, node.name, where)
    for key, value in node.arguments.items():
        place, hint = f"{where}.{key}", hints.get(key, Any)
        _place(place, value, hint)
        if value and _is_marked(hint) and (not isinstance(value, Node) or value.is_partial):
            node.named_again[place] = value
    hparams = getattr(node.call, "Hparams", None)
    if hparams is not None and not node.is_partial:
        names = hparams.__dataclass_fields__
        hparams.of_node({k: v for k, v in node.arguments.items() if k in names}, where)


def _place(where: str, value: Any, hint: Any) -> None:
    """Hold a value against the annotation of its place."""
    fitting(where, value, hint)
    for node in nodes(value):
        if not node.is_placed:
            told = f"{where}._target_={node.name} is not allowed there"
            raise ValueError(f"{told}: {where} takes plain values")


def _is_marked(hint: Any) -> bool:
    """Return whether a value runs code or sends data away; of unknown type, it may."""
    markers = getattr(hint, "__metadata__", ())
    known = any(isinstance(one, NamedAgain) for one in markers)
    return known or hint is Any or any(map(_is_marked, get_args(hint)))


def parameters(call: Any) -> tuple[dict[str, Any], bool]:
    """Return name -> annotation of what a class or function takes, and whether of any name.

    Where it takes `**hparams`, they are the fields of its class attribute `Hparams`.
    """
    try:
        found = inspect.signature(call).parameters
    except (ValueError, TypeError):  # written in C, without a signature
        return {}, True
    try:
        hints = annotations_of(call)
    except (NameError, TypeError, AttributeError):
        if call.__module__.partition(".")[0] == OWN:
            raise
        hints = {}  # of a library, under names that only a type checker sees
    is_open = any(p.kind is p.VAR_KEYWORD for p in found.values())
    further: dict[str, Any] = {}
    if hasattr(call, "Hparams"):
        is_open, further = False, annotations_of(call.Hparams)
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = {name: hints.get(name, Any) for name, p in found.items() if is_open or p.kind in kinds}
    return named | further, is_open


def check_names(node: Any, where: str = "") -> None:
    """Refuse names outside of the packages that may be configured; imports nothing.

    Raises:
        TargetError: with the place and the name.
    """
    if isinstance(node, Mapping):
        if "_target_" in node:
            name = str(node["_target_"])
            if not (_NAME.fullmatch(name) and name.startswith((*trusted_targets(), *_ROOTS))):
                raise TargetError(_refusal(where, name))
        for key, value in node.items():
            check_names(value, f"{where}.{key}")
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            check_names(value, f"{where}[{index}]")


def resolve(name: str, where: str) -> Any:
    """Return the class or function of a name, of a package that may be configured.

    Raises:
        TargetError: if there is none, or if it is something that was only imported there.
    """
    check_names({"_target_": name}, where)
    root = name.partition(".")[0]
    path, _, last = name.rpartition(".")
    holder = _holder(path, where, name)
    found = getattr(holder, last, None)
    if found is None:
        known = [item for item in dir(holder) if not item.startswith("_")]
        raise TargetError(f"{where}._target_={name}: no {last} there{did_you_mean(last, known)}")
    if inspect.isclass(holder):
        allowed = _is_constructor(holder, last)
    else:
        allowed = inspect.isclass(found) or inspect.isfunction(found)
        allowed &= str(getattr(found, "__module__", "")).partition(".")[0] == root
    if not allowed or (root in LIBRARIES and not inspect.isclass(found)):
        raise TargetError(_refusal(where, name))
    return found


def _is_constructor(cls: type, name: str) -> bool:
    """Return whether a class method makes an instance, and names all of its arguments."""
    method = getattr(cls, name)
    if not isinstance(inspect.getattr_static(cls, name), classmethod):
        return False
    kinds = [p.kind for p in inspect.signature(method).parameters.values()]
    open_ended = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} & set(kinds)
    return annotations_of(method).get("return") is Self and not open_ended


def _holder(path: str, where: str, name: str) -> ModuleType | type:
    """Return the module of a path, or a class whose method is meant."""
    try:
        return importlib.import_module(path)
    except ImportError as error:
        package, _, last = path.rpartition(".")
        if inspect.isclass(getattr(sys.modules.get(package), last, None)):
            with contextlib.suppress(TargetError):
                cls: type = resolve(path, where)
                return cls
            raise TargetError(_refusal(where, name)) from None
        folder = getattr(sys.modules.get(package), "__path__", [])
        near = did_you_mean(last, [module.name for module in pkgutil.iter_modules(folder)])
        told = f"{where}._target_={name} cannot be imported: {error}{near}"
        raise TargetError(told) from error


def _refusal(where: str, name: str) -> str:
    return (
        f"{where}._target_={name} is not allowed; allowed are classes, their from_pretrained and "
        f"functions of {OWN}, classes of {', '.join(LIBRARIES)}, and the prefixes in "
        "RLHF_ALLOWED_TARGETS"
    )
