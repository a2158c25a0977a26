"""Imports point down, each library has its layers, and files stay small enough to read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rlhf_lightning"
Trees = dict[Path, ast.Module]

# From the bottom up; the same ranks stand in docs/architecture.md.
LAYERS = (
    {"misfit"},
    {"arguments"},
    {"functional", "batches", "hparams", "runs"},
    {"models", "distributed"},
    {"text"},
    {"data", "rollout"},
    {"modules", "preferences"},
    {"evaluation", "doctor"},
    {"reports"},
    {"callbacks"},
    {"app"},
    {"train", "collect", "annotate", "evaluate", "export", "plan", "report", "dashboard"}
    | {"chat", "pipeline", "study", "preview", "env"},
)
RANKS = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
ENTRY_POINTS = {part for part, rank in RANKS.items() if rank > RANKS["app"]}
HYDRA = {"hydra", "omegaconf"}
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning"}
LIGHTNING_PARTS = {"modules", "callbacks", "data", "distributed", "app"}
HEAVY = {"torch", "lightning", "transformers", "datasets", "wandb", "scipy", "matplotlib", "peft"}
PURE_PARTS = {"misfit", "arguments", "functional", "batches", "hparams"}
NOT_PURE = HEAVY - {"torch", "scipy"} | HYDRA
BANNED_NAMES = {"utils", "util", "helpers", "helper", "misc", "common"}
MAX_FILE_LINES = 500
MAX_ENTRY_POINT_LINES = 10
MAX_FOLDERS = 14
MAX_FUNCTION_LINES = 50


def part_of(path: Path) -> str:
    """Name the part of the package a file belongs to: `functional/kl.py` -> `functional`."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every import, wherever it stands in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def import_violations(part: str, tree: ast.Module) -> list[str]:
    """List what a file of `part` must not import, as `line: reason`."""
    found = [
        f"{line}: {reason}"
        for line, name in imported_names(tree)
        if (reason := forbidden(part, name))
    ]
    if part != "distributed":
        found += [
            f"{node.lineno}: torch.distributed belongs to distributed/"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
        ]
    return list(dict.fromkeys(found))


def forbidden(part: str, name: str) -> str | None:
    """Say why `part` may not import `name`, or return None where it may."""
    library, *rest = name.split(".")
    if not library:
        return f"{name} is a relative import: write the whole name"
    if library == "rlhf_lightning":
        return forbidden_inside(part, rest[0] if rest else "__init__")
    if library in HYDRA and part != "app":
        return f"{name}: only app imports {library}"
    if library in LIGHTNING and part not in LIGHTNING_PARTS:
        return f"{name}: only {', '.join(sorted(LIGHTNING_PARTS))} import {library}"
    if library in NOT_PURE and part in PURE_PARTS:
        return f"{name}: {part} is tensors in, tensors out"
    if name.startswith("torch.distributed") and part != "distributed":
        return f"{name} belongs to distributed/"
    return None


def forbidden_inside(part: str, wanted: str) -> str | None:
    if wanted == part or wanted.startswith("__"):
        return None
    if wanted not in RANKS:
        return f"rlhf_lightning.{wanted} has no rank"
    if RANKS[wanted] >= RANKS[part]:
        return (
            f"{part} (rank {RANKS[part]}) must not import {wanted} (rank {RANKS[wanted]}): "
            "imports point strictly down"
        )
    return None


def long_functions(source: str) -> list[str]:
    """List functions of more than 50 lines, their docstring not counted."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            found.append(f"{node.lineno}: {node.name} has {lines} lines")
    return found


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def own_files() -> list[Path]:
    folders = (PACKAGE, ROOT / "tests", ROOT / "benchmarks", ROOT / "docs")
    files = (file for folder in folders for file in folder.rglob("*.py"))
    # Hidden folders hold what others wrote, such as environments.
    return sorted(f for f in files if not any(p[0] == "." for p in f.relative_to(ROOT).parts))


@pytest.fixture(scope="module")
def trees() -> Trees:
    return {file: ast.parse(file.read_text()) for file in package_files()}


def test_imports_point_down_and_libraries_stay_in_their_layers(trees: Trees) -> None:
    assert {part_of(file) for file in trees} - {"__init__", "__main__"} <= set(RANKS)
    found = [
        f"{file.relative_to(ROOT)}:{violation}"
        for file, tree in trees.items()
        if part_of(file) in RANKS
        for violation in import_violations(part_of(file), tree)
    ]
    assert not found, "\n".join(found)


def test_configurations_leave_app_config_as_typed_settings_alone(trees: Trees) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file, tree in trees.items()
        if PACKAGE / "app/config" not in file.parents
        for line, name in imported_names(tree)
        if name.split(".")[0] == "omegaconf"
    ]
    assert not found, "\n".join(found)


def calls_of(name: str, tree: ast.Module) -> list[int]:
    """Return the lines that call a function of this name, by itself or in its module."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [c.lineno for c in calls if ast.unparse(c.func).rpartition(".")[2] == name]


@pytest.mark.thorough
def test_what_is_named_in_a_configuration_is_built_in_one_place(trees: Trees) -> None:
    calls = [file for file, tree in trees.items() for _ in calls_of("read_node", tree)]
    assert calls == [PACKAGE / "app/config/groups.py"]
    assert not [file for file, tree in trees.items() if calls_of("instantiate", tree)]


def test_the_architecture_page_lists_every_part_from_the_bottom_up() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| \d+ \| ([^|]+) \|", page, re.M)
    listed = [re.findall(r"`(\w+)`", row) for row in rows]
    assert sorted(part for row in listed for part in row) == sorted(RANKS)
    assert [RANKS[part] for row in listed for part in row] == sorted(RANKS.values())


def test_no_file_imports_itself_by_way_of_others(trees: Trees) -> None:
    names = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in trees
    }
    edges: dict[str, set[str]] = {name: set() for name in names}
    for name, file in names.items():
        for _, wanted in imported_names(trees[file]):
            found = wanted if wanted in names else wanted.rpartition(".")[0]
            if found in names and found != name:
                edges[name].add(found)
    assert sum(map(len, edges.values())) > 500
    TopologicalSorter(edges).prepare()  # raises a CycleError


def test_the_root_of_the_package_holds_the_vocabulary_and_entry_points_alone() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))}
    assert len(folders) <= MAX_FOLDERS
    files = {path.stem for path in PACKAGE.glob("*.py")}
    words = {"arguments", "batches", "hparams", "misfit"}
    assert files == ENTRY_POINTS | {"__init__"} | words
    for name in ENTRY_POINTS:
        lines = (PACKAGE / f"{name}.py").read_text().splitlines()
        assert len(lines) <= MAX_ENTRY_POINT_LINES, name


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("models", "def f():\n    import rlhf_lightning.modules.ppo"),
        ("models", "import lightning as L"),
        ("modules", "import torch\ntorch.distributed.all_reduce(1)"),
        ("data", "from .records import TextRecord"),
        ("data", "import rlhf_lightning.nowhere"),
    ],
)
def test_a_forbidden_import_is_found(part: str, source: str) -> None:
    assert len(import_violations(part, ast.parse(source))) == 1


def test_files_and_functions_are_short() -> None:
    found = []
    for file in own_files():
        source = file.read_text()
        lines = len(source.splitlines())
        name = file.relative_to(ROOT)
        if lines > MAX_FILE_LINES:
            found.append(f"{name} has {lines} lines, at most {MAX_FILE_LINES}")
        found += [f"{name}:{long}, at most {MAX_FUNCTION_LINES}" for long in long_functions(source)]
    assert not found, "\n".join(found)


def test_nothing_is_called_utils() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if BANNED_NAMES & set(path.stem.lower().split("_")) and path.suffix in ("", ".py")
    ]
    assert not found


def test_few_functions_of_app_import() -> None:
    inside = {
        (file.name, node.lineno)
        for file in (PACKAGE / "app").rglob("*.py")
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert 0 < len(inside) <= 15, "what is imported when is decided in app/start.py"
