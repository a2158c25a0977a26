"""Commands of the docs that hold a variable do the same in bash and in zsh."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(?:sh|bash|console)?\n(.*?)^```", re.M | re.S)
ARRAY = re.compile(r'"\$\{[A-Z_]+\[@\]\}"')
TEXT_OF_SEVERAL = re.compile(
    r"""^\s*(?:export )?[A-Z_]+=(["'])[^"'\n]*\s[^"'\n]*=[^"'\n]*\1""", re.M
)
SCALAR = re.compile(r"\$\{?[A-Za-z_]+")


def unsplit(block: str) -> list[str]:
    """Return the variables of a block that only some shells would split into words."""
    found = [match.group().strip() for match in TEXT_OF_SEVERAL.finditer(block)]
    for line in ARRAY.sub("", block).splitlines():
        if re.search(r"-m rlhf_lightning|\brlhf-\w+", line):
            found += SCALAR.findall(line)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_of_a_page_relies_on_a_shell_that_splits_variables(page):
    blocks = FENCE.findall(page.read_text(encoding="utf-8"))
    assert [word for block in blocks for word in unsplit(block)] == []


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_arrays_of_a_page_become_one_word_an_override(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    text = (ROOT / "docs" / "your_model_and_data.md").read_text(encoding="utf-8")
    (block,) = (block for block in FENCE.findall(text) if "REVIEWS=(" in block)
    said = re.sub(r"^python -m", "printf '%s|'", block, flags=re.M)
    result = subprocess.run([shell, "-c", said], capture_output=True, text=True, check=True)
    words = result.stdout.split("|")
    assert words.count("dataset.positive=rt-polarity.pos") == 3
    assert words.count("dataset.negative=rt-polarity.neg") == 3
