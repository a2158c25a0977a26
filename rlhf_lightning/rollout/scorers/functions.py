"""Reward functions: where one is found, how it is called, and what it may return."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_lightning.arguments import CodeName
from rlhf_lightning.rollout.scorers.containment import contained, said

RewardFunction = Callable[..., Any]
OURS = ("prompts", "completions")
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class CallForm:
    """The form in which a reward function takes prompts, completions and columns.

    Args:
        positional: names of the values that are passed by position, in order.
        keywords: names of the values that may be passed by keyword.
        takes_all: whether it has `**columns`.
        defaults: default by name, for the parameters that have one.
        required: names without a default.
    """

    positional: tuple[str, ...]
    keywords: frozenset[str]
    takes_all: bool
    defaults: Mapping[str, Any]
    required: tuple[str, ...]

    @classmethod
    def of(cls, function: RewardFunction, what: str) -> CallForm:
        """Return the form of a function.

        Prompts and completions are passed by keyword where the function has these names, and by
        position where its first two names say nothing (`lambda p, c: ...`, `*args`).

        Args:
            function: any Python callable.
            what: names it in errors.

        Raises:
            ValueError: if it takes no completions, or something else in their place.
        """
        if inspect.isclass(function):
            raise ValueError(f"{what} is a class: give what it makes, {function.__name__}(...)")
        parameters = _parameters(function)
        ordered = [p for p in parameters if p.kind in _BY_POSITION]
        given = [p.name for p in parameters if p.kind not in _VARIADIC]
        kinds = [p.kind for p in parameters]
        takes_all = Parameter.VAR_KEYWORD in kinds
        names = [p.name for p in ordered]
        neutral = not _begins_with_response(names)
        for i, (p, ours) in enumerate(zip(ordered[:2], OURS, strict=False)):
            if neutral and _says_nothing(p, i) and ours not in given:
                names[i] = ours
        last = [
            i
            for i, p in enumerate(ordered)
            if names[i] != p.name or p.kind is p.POSITIONAL_ONLY or hasattr(function, "dispatch")
        ]  # functools.singledispatch looks at the first argument by position
        positional = names[: last[-1] + 1] if last else []
        star = Parameter.VAR_POSITIONAL in kinds and not takes_all
        if star and "completions" not in given and tuple(names) == OURS[: len(names)]:
            names = positional = list(OURS)
        keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        unnamed = dict(zip((p.name for p in ordered), names, strict=False))
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        required = [unnamed.get(name, name) for name in given if name not in defaults]
        others = [name for name in required if name not in OURS]
        if "completions" not in (*names, *keyword_only) and (others or not takes_all):
            raise ValueError(
                f"{what} takes ({', '.join(str(p) for p in parameters)}), and none of these is "
                "completions: name its parameters prompts, completions and the columns it reads"
            )
        by_keyword = frozenset({*names, *keyword_only} - set(positional))
        return cls(tuple(positional), by_keyword, takes_all, defaults, tuple(required))

    def arguments(self, values: Mapping[str, Any], what: str) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and the keyword arguments of a call.

        Args:
            values: prompts, completions and columns.
            what: names the function in errors.

        Raises:
            ValueError: if a column is missing that it needs, or that may hold the completions.
        """
        missing = [name for name in self.required if name not in values]
        columns = sorted(set(values) - set(OURS))
        if "completions" not in (*self.positional, *self.keywords):  # f(solution_str=None, **k)
            unknown = [k for k, v in self.defaults.items() if v is None and k not in values]
            if unknown and not missing:
                raise ValueError(
                    f"{what}: {unknown[0]!r} may be meant for the completions, as no column of the "
                    f"prompts has that name ({columns}): name a parameter completions"
                )
        if missing:
            raise ValueError(
                f"{what} needs the column {missing[0]!r}, and the prompts have the columns "
                f"{columns}: add it to the data, or give the parameter a default; completions are "
                "given to a parameter of that name"
            )
        keyword = {
            name: value
            for name, value in values.items()
            if name not in self.positional and (self.takes_all or name in self.keywords)
        }
        return [values.get(name, self.defaults.get(name)) for name in self.positional], keyword


_RESPONSES = ("a", "o", "r", "y")  # answer, output, response, and what y is of x
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def _parameters(function: RewardFunction) -> list[Parameter]:
    """Return a function's own parameters; of a wrapper that passes on everything, what it wraps."""
    if isinstance(function, torch.nn.Module):
        function = function.forward
    for follow in (False, True):
        try:
            signature = inspect.signature(function, follow_wrapped=follow)
        except (TypeError, ValueError):  # some built-in functions have none
            continue
        found = list(signature.parameters.values())
        if follow or any(p.kind not in _VARIADIC for p in found):
            return found
    return [Parameter("args", Parameter.VAR_POSITIONAL)]


def _says_nothing(parameter: Parameter, place: int) -> bool:
    """Return whether a name is `_...` or one letter, and not the first letter of the other one."""
    name = parameter.name
    letter = len(name) == 1 and name != OURS[1 - place][0]
    return parameter.default is parameter.empty and (letter or name.startswith("_"))


def _begins_with_response(names: Sequence[str]) -> bool:
    """Return whether the first name is one letter of a response: (r, q), but not (a, b)."""
    first, second = (*names, "", "")[:2]
    return first in _RESPONSES and second not in (chr(ord(first) + 1), OURS[1], OURS[1][0])


def listed(returned: Any, count: int) -> list[float | str] | None:
    """Return what a function returned as numbers, at most one more than `count`.

    NaN where it is None, and a short text that shows it where it is no finite number of float32; a
    list of one number counts as the number. None if it is no sequence of values: a number, a text,
    or something without an order. This runs code of what was returned.
    """
    if hasattr(returned, "to_numpy"):  # a DataFrame iterates over the names of its columns
        returned = returned.to_numpy()
    if hasattr(returned, "tolist"):  # NumPy, torch on any device
        returned = returned.tolist()
    if isinstance(returned, str | bytes | bytearray | memoryview | Mapping | Set) or not isinstance(
        returned, Iterable
    ):
        return None
    return [_number(value) for value in islice(returned, count + 1)]


def read_scores(values: Sequence[float | str], completions: Sequence[str], what: str) -> Tensor:
    """Return one number a completion, NaN where the function returned None.

    Args:
        values: result of `listed`.
        completions: completions that it scored.
        what: names it in errors.

    Raises:
        ValueError: if there are more or fewer, or one is neither a finite number of float32 nor
            None.
    """
    count = len(completions)
    if len(values) != count:
        found = f"more than {count}" if len(values) > count else f"{len(values)}"
        raise ValueError(
            f"{what} returned {found} scores for {count} completions: return one number a "
            "completion"
        )
    for row, value in enumerate(values):
        if isinstance(value, str):
            raise ValueError(
                f"{what} returned {value} for completion {row} ({completions[row][:200]!r}): "
                "return a finite number of float32, or None where the reward does not apply"
            )
    return torch.tensor(values, dtype=torch.float32)


def _number(value: Any) -> float | str:
    if isinstance(value, list | tuple) and len(value) == 1:  # a row of [B, 1]
        (value,) = value
    if value is None:
        return math.nan
    # Texts and complex numbers of NumPy have a `__float__`, which loses what they say.
    if hasattr(value, "__float__") and not isinstance(value, str | bytes | np.complexfloating):
        with suppress(Exception):  # a tensor of several numbers, an integer beyond float64
            number = float(value)
            if abs(number) <= LARGEST:
                return number
    try:
        return reprlib.repr(value)
    except Exception:  # an integer of thousands of digits
        return f"a value of type {type(value).__name__}"


def load_function(path: CodeName, *, seconds: float = 300.0) -> RewardFunction:
    """Return the callable that `path.py:name` or `package.module.name` names.

    Args:
        path: its name; a file is read in `contained`.
        seconds: after which reading a file is interrupted.

    Raises:
        TimeoutError: if that took longer.
        ValueError: if there is no such file, module or callable.
    """
    file, colon, name = path.rpartition(":")
    try:
        if colon:
            module: object = _load_file(Path(file), seconds)
        else:
            module_name, _, name = path.rpartition(".")
            module = importlib.import_module(module_name)
    except (ImportError, FileNotFoundError, TypeError, ValueError) as error:
        raise ValueError(
            f"reward function {path!r}: {error}; give 'path.py:name' or 'package.module.name'"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"reward function {path!r}: {name!r} is no callable there")
    return function  # type: ignore[no-any-return]


def _load_file(file: Path, seconds: float) -> Any:
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}")
    spec = importlib.util.spec_from_file_location(f"reward_function_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    execute = partial(spec.loader.exec_module, module)
    try:
        contained(execute, bool, f"{file}", seconds=seconds, about="its import", settings=False)
    except BaseException as error:
        sys.modules.pop(spec.name, None)
        if type(error) is not RuntimeError:  # its time is up, or the run is to stop
            raise
        raise ImportError(f"while it was read: {said(error.__cause__ or error)}") from error
    return module
