"""Reward functions: where one is found, how it is called, and what it may return."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import logging
import math
import reprlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_lightning.arguments import CodeName
from rlhf_lightning.rollout.background import in_background

RewardFunction = Callable[..., Any]
OURS = ("prompts", "completions")
LARGEST = torch.finfo(torch.float32).max
SLOW_SECONDS = 30.0  # after which a call that still runs is named

logger = logging.getLogger(__name__)


def names_taken(function: RewardFunction, what: str) -> frozenset[str] | None:
    """Return the names that a function takes by keyword; None if it has `**columns`.

    Args:
        function: any Python callable.
        what: names it in errors.

    Raises:
        ValueError: unless it takes `completions` by keyword.
    """
    parameters = inspect.signature(function).parameters.values()
    keywords = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    names = frozenset(p.name for p in parameters if p.kind in keywords)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    alone = all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    if "completions" not in names and not (takes_any and alone):
        raise ValueError(
            f"{what} takes ({', '.join(map(str, parameters))}), and arguments are passed by "
            "keyword: write def NAME(prompts, completions, **columns)"
        )
    return None if takes_any else names


def call_function(
    function: RewardFunction, values: Mapping[str, Any], names: frozenset[str] | None, what: str
) -> Any:
    """Return what a function returns for the values that it takes, awaited if it is a coroutine.

    Args:
        function: the callable.
        values: prompts, completions and columns.
        names: the result of `names_taken`.
        what: names the function in errors.

    Raises:
        RuntimeError: if it raises, with its error, the first response and the columns.
    """
    given = {name: value for name, value in values.items() if names is None or name in names}
    columns = sorted(set(values) - set(OURS))
    shown = ", ".join(f"{name}[0]={values[name][0]!r:.200}" for name in OURS)

    async def awaited(returned: Any) -> Any:
        return await returned

    try:
        with named_while_running(what):
            returned = function(**given)
            if inspect.isawaitable(returned):
                coroutine = awaited(returned)  # the loop of a notebook is in this thread
                returned = in_background(lambda: asyncio.run(coroutine)).result()
    except (Exception, SystemExit) as error:
        raise RuntimeError(
            f"{what} raised {_line(error)}; it was called with texts (no lists of messages), "
            f"{shown}, and the columns {columns}"
        ) from error
    return returned


@contextmanager
def named_while_running(what: str) -> Iterator[None]:
    """Name a call that takes `SLOW_SECONDS`, and again each time that this doubles."""
    done = threading.Event()

    def watch() -> None:
        wait = passed = SLOW_SECONDS
        while not done.wait(wait):
            logger.warning("%s is still running after %g seconds", what, passed)
            wait, passed = passed, 2 * passed

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def read_scores(returned: Any, completions: Sequence[str], what: str) -> Tensor:
    """Return one number a completion, NaN where the function returned None.

    Args:
        returned: list, NumPy array or tensor of `[B]` or `[B, 1]`.
        completions: completions that it scored.
        what: names the function in errors.

    Raises:
        ValueError: for another type or length, and for a value that is neither a finite number of
            float32 nor None.
    """
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple) or len(values) != len(completions):
        is_list = isinstance(values, list | tuple)
        got = f"{len(values)} scores" if is_list else type(returned).__name__
        raise ValueError(
            f"{what} returned {got} for {len(completions)} completions: return a list with one "
            "number a completion"
        )
    scores = list(map(_number, values))
    for row, score in enumerate(scores):
        if score is None:
            raise ValueError(
                f"{what} returned {reprlib.repr(values[row])} for completion {row} "
                f"({completions[row][:200]!r}): return a finite number of float32, or None where "
                "the reward does not apply"
            )
    return torch.tensor(scores, dtype=torch.float32)


def _number(value: Any) -> float | None:
    if hasattr(value, "tolist"):  # a scalar of NumPy or torch
        value = value.tolist()
    if isinstance(value, list | tuple) and len(value) == 1:  # a row of [B, 1]
        (value,) = value
    if value is None:
        return math.nan
    return float(value) if isinstance(value, int | float) and abs(value) <= LARGEST else None


def load_function(path: CodeName) -> RewardFunction:
    """Return the callable that `path.py:name` or `package.module.name` names.

    Raises:
        ValueError: if there is no such file, module or callable, or it cannot be read.
    """
    place, _, name = path.rpartition(":" if ":" in path else ".")
    try:
        module = _load_file(Path(place)) if ":" in path else importlib.import_module(place)
        function = getattr(module, name, None)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"reward function {path!r}: {_line(error)}; give 'path.py:name' or "
            "'package.module.name'"
        ) from error
    if not callable(function):
        raise ValueError(f"reward function {path!r}: {name!r} is no callable there")
    return function  # type: ignore[no-any-return]


def _load_file(file: Path) -> Any:
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}")
    spec = importlib.util.spec_from_file_location(f"reward_function_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
