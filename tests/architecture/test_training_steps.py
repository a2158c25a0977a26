"""The algorithm of a module can be read in one screen."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable

import pytest

from rlhf_lightning import DPOModule, PolicyGradientModule, PPOModule

MOST_LINES = 15


def lines_of_code(function: Callable[..., object]) -> int:
    """Return the lines of a function's body, without its docstring, comments and blank lines."""
    source = textwrap.dedent(inspect.getsource(function))
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.FunctionDef)
    body = [node for node in tree.body if not is_docstring(node)]
    text = source.splitlines()[body[0].lineno - 1 :]
    return sum(bool(line.partition("#")[0].strip()) for line in text)


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@pytest.mark.parametrize("module", [PPOModule, PolicyGradientModule, DPOModule])
def test_a_training_step_has_fifteen_lines_of_code_at_most(module: type) -> None:
    assert 3 <= lines_of_code(module.training_step) <= MOST_LINES
