"""The documentation names metrics, files and tests that exist, and every metric is in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from rlhf_lightning.runs.metric_catalog import QUANTITIES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rlhf_lightning"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

METRIC = re.compile(r"(?:rollout|ppo|dpo|sft|reward|val|doctor|time|throughput)/[a-z0-9_*]+")
# What an f-string appends to a prefix that it was given: `*_low` of `val/gold_win_rate`.
SUFFIX = re.compile(r"\*[a-z0-9_]{4,}")
PLACEHOLDER = re.compile(r"<(name|domain)>")
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|yaml|md|json))(?:::(\w+))?`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def strings(tree: ast.AST) -> Iterator[str]:
    """Yield string literals; what an f-string fills in is written `*`."""
    nodes = list(ast.walk(tree))
    filled = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    pieces = {id(piece) for values in filled for piece in values}
    for values in filled:
        yield "".join(p.value if isinstance(p, ast.Constant) else "*" for p in values)
    for node in nodes:
        if isinstance(node, ast.Constant) and id(node) not in pieces:
            yield str(node.value)


def code_strings() -> set[str]:
    trees = [ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")]
    return {text for tree in trees for text in strings(tree)} | set(QUANTITIES)


def documented_metrics() -> set[str]:
    text = PLACEHOLDER.sub("*", (ROOT / "docs" / "metrics.md").read_text())
    return {m.group(1) for m in re.finditer(rf"`({METRIC.pattern})`", text)}


def same(first: str, second: str) -> bool:
    return fnmatch(first, second) or fnmatch(second, first)


@pytest.mark.thorough
def test_metrics_of_the_code_are_documented_and_no_others() -> None:
    texts, docs = code_strings(), documented_metrics()
    code = {text for text in texts if METRIC.fullmatch(text)}
    assert {"rollout/kl_per_token", "ppo/approx_kl"} <= code & docs
    # A prefix that is passed on ends in an underscore or a slash and names no metric itself.
    whole = (name for name in code if not name.endswith("_"))
    missing = {name for name in whole if not any(same(name, other) for other in docs)}
    assert not missing, f"docs/metrics.md lacks {sorted(missing)}"
    code |= {text for text in texts if SUFFIX.fullmatch(text)}
    unknown = {name for name in docs if not any(same(name, other) for other in code)}
    assert not unknown, f"docs/metrics.md names {sorted(unknown)}, which nothing logs"


def test_the_files_that_pages_name_exist() -> None:
    named = {(page.name, name) for page in PAGES for name, _ in FILE.findall(page.read_text())}
    assert not [x for x in named if not any((top / x[1]).exists() for top in (ROOT, PACKAGE))]


def test_the_links_of_pages_lead_somewhere() -> None:
    links = [(page, found.group(1)) for page in PAGES for found in LINK.finditer(page.read_text())]
    assert not [link for page, link in links if not (page.parent / link).exists()]


def test_every_invariant_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (C\d+b?) \|.*$", (ROOT / "docs/correctness.md").read_text(), re.M)
    assert rows == [f"C{n}" if n != 11.5 else "C11b" for n in (*range(1, 12), 11.5, *range(12, 24))]
    for line in (ROOT / "docs/correctness.md").read_text().splitlines():
        if not line.startswith("| C"):
            continue
        tests = FILE.findall(line)
        assert tests, f"no test is named for {line[:60]}"
        for file, function in tests:
            assert function, f"{file} needs ::test_name"
            assert f"def {function}(" in (ROOT / file).read_text(), f"{file}::{function}"
