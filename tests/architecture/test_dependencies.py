"""What the package imports is declared, and what is declared is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest

from tests.architecture.test_layers import ROOT, imported_names, package_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def canonical(name: str) -> str:
    """Write a distribution's name as every tool compares it: `huggingface-hub`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {canonical(re.split(r"[<>=!~;\[ ]", line)[0]) for line in requirements}


BASE = names(PROJECT["dependencies"])
EXTRAS = {extra: names(lines) for extra, lines in PROJECT["optional-dependencies"].items()}
OPTIONAL = set().union(*(found for extra, found in EXTRAS.items() if extra != "dev"))


def imported() -> set[str]:
    """Name the distributions of all that the package imports, wherever the import stands."""
    modules = {
        name.split(".")[0]
        for file in package_files()
        for _, name in imported_names(ast.parse(file.read_text()))
    }
    modules -= {*sys.stdlib_module_names, "rlhf_lightning"}
    known = packages_distributions()
    return {canonical(name) for module in modules for name in known.get(module, [module])}


@pytest.mark.thorough
def test_every_library_that_the_package_imports_is_declared() -> None:
    found = imported()
    assert {"torch", "hydra-core", "filelock", "httpx", "jinja2"} <= found
    assert not found - BASE - OPTIONAL


def test_every_dependency_is_pinned_in_the_tested_set() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = names([line for line in lines if not line.startswith("#")])
    assert len(pinned) > 100
    assert not BASE - pinned
