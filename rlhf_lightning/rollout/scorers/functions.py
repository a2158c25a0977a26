"""Functions and classes by `path.py:name` or `package.module.name`; imports no torch."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from symtable import symtable
from typing import Any

from rlhf_lightning.arguments import CodeName
from rlhf_lightning.misfit import did_you_mean, near_path

_FIX = "give 'path.py:name' or 'package.module.name'"
# A file with one of these may have names that only running it shows.
_MAKES_NAMES = re.compile(r"import\s*\*|\b(__getattr__|globals|locals|vars|exec|modules)\b")


def load_function(path: CodeName, what: str = "reward function") -> Callable[..., Any]:
    """Return the callable that `path.py:name` or `package.module.name` names.

    Args:
        path: its file or module, and its name.
        what: what it is, for the errors.

    Raises:
        ValueError: if there is no such file, module or callable, or it cannot be read.
    """
    place, _, name = path.rpartition(":" if ":" in path else ".")
    spec = _spec(place, f"{what} {path!r}") if ":" in path else None
    with _refusing(path, what):
        module = importlib.import_module(place) if spec is None else _load_file(spec)
        function = getattr(module, name, None)
    if not callable(function):
        raise _not_there(f"{what} {path!r}", name, vars(module))
    return function  # type: ignore[no-any-return]


def check_function(path: CodeName, what: str = "reward function") -> None:
    """Refuse a name that its file does not bind, as `load_function` does; the file is not run.

    A dotted name, and a file that makes names while it runs, are left to `load_function`.

    Args:
        path: its file, and its name.
        what: what it is, for the errors.

    Raises:
        ValueError: if there is no such file or name, or the file is not valid Python.
    """
    place, _, name = path.rpartition(":")
    if not place.endswith(".py"):
        return
    _spec(place, f"{what} {path!r}")
    with _refusing(path, what):
        source = importlib.util.decode_source(Path(place).read_bytes())
        symbols = symtable(source, place, "exec").get_symbols()
    known = {
        one.get_name()
        for one in symbols
        if one.is_assigned() or one.is_imported() or one.is_declared_global()
    }
    if name not in known and not _MAKES_NAMES.search(source):
        raise _not_there(f"{what} {path!r}", name, known)


def error_line(error: BaseException) -> str:
    """Return an error as one line with its class."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


@contextmanager
def _refusing(path: str, what: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} {path!r}: {error_line(error)}; {_FIX}") from error


def _not_there(what: str, name: str, known: Iterable[str]) -> ValueError:
    return ValueError(f"{what}: {name!r} is no function there{did_you_mean(name, known)}")


def _spec(place: str, what: str) -> ModuleSpec:
    file = Path(place)
    spec = importlib.util.spec_from_file_location(f"reward_function_{file.stem}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        near = near_path(file, Path.is_file) or f"; {_FIX}"
        raise ValueError(f"{what}: there is no Python file {file}{near}")
    return spec


def _load_file(spec: ModuleSpec) -> Any:
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module
