"""The commands of docs/scaling.md compose, and its times follow from its formulas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.builders.command_lines import settings_of

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text()


def commands() -> list[list[str]]:
    """Return the overrides of each command of the page's code blocks."""
    blocks = re.findall(r"^```\n(.*?)^```", PAGE, re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        _, program, rest = line.partition("rlhf_lightning.")
        if program:
            words = rest.split()[1:]
            found.append([word for word in words if re.match(r"\+?[\w./]+=", word)])
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("overrides", commands(), ids=" ".join)
def test_a_command_of_the_page_composes(overrides):
    kept = [override for override in overrides if not override.startswith("plan.")]
    settings_of(*kept)
