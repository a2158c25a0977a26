"""The rule of the study `commands`."""

from __future__ import annotations

import pytest

from benchmarks.studies.commands import names_the_program


@pytest.mark.parametrize(
    ("page", "answer", "follows"),
    [
        ("tar", "tar -x", True),
        ("tar", "zip -x", False),
        ("tar", "", False),
        ("git-commit", "git commit", True),
        ("git-commit", "git-commit", True),
        ("git-commit", "gi commit", False),
        ("mkfs.ext4", "mkfs.ext4 {{disk}}", True),
        ("mkfs.ext4", "mkfs {{disk}}", False),
    ],
)
def test_a_command_follows_the_page_or_the_program_of_its_subcommand(page, answer, follows):
    prompt = f"system: Write.\n\nuser: Platform: linux\nProgram: {page}. Does things.\nTask: do."
    assert names_the_program(prompt, answer) == float(follows)
    assert names_the_program("Task: do.", answer) == 0.0
