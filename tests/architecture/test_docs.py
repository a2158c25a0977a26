"""The documentation names files and tests that exist, and its links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rlhf_lightning"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|yaml|md|json))(?:::(\w+))?`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def named_files(page: Path) -> Iterator[tuple[str, str | None]]:
    for match in FILE.finditer(page.read_text()):
        if "*" not in match.group(1):
            yield match.group(1), match.group(2)


def test_the_files_that_pages_name_exist() -> None:
    missing = [
        f"{page.name}: {name}"
        for page in PAGES
        for name, _ in named_files(page)
        if not (ROOT / name).exists() and not (PACKAGE / name).exists()
    ]
    assert not missing


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
