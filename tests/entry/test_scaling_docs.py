"""The commands of docs/scaling.md compose, and its times follow from its formulas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf_lightning.app.config.compose import choices
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


@pytest.mark.parametrize("overrides", commands(), ids=" ".join)
def test_a_command_of_the_page_composes(overrides):
    kept = [override for override in overrides if not override.startswith("plan.")]
    settings_of(*kept)


def test_the_page_shows_every_way_to_start_processes():
    assert len(commands()) >= 7
    for way in ("torchrun --nproc-per-node", "torchrun --nnodes", "srun", "launcher=slurm"):
        assert way in PAGE
    assert "slurm" in choices("launcher")
    for setting in ("strategy.shard_over", "strategy.cpu_offload"):
        assert setting in PAGE


def test_the_times_on_paper_follow_from_their_formulas():
    parameters, tokens, gpus = 7.6e9, 256 * 1024, 8
    arithmetic, memory, link = 0.4 * 312e12, 0.6 * 2.0e12, 200e9
    seconds = {
        "generate": 512 * (2 * parameters + 1.4e9) / memory,
        "score": 4 * 2 * parameters * tokens / gpus / arithmetic,
        "update": 2 * 2 * 8 * parameters * tokens / gpus / arithmetic,
        "gathers": 8 * 2 * 2 * 8 * parameters / link,
    }
    for name, value in seconds.items():
        row = next(
            line for line in PAGE.splitlines() if re.match(rf"\| {name}\b.*\| \d+ \|$", line)
        )
        assert round(value) == int(row.split("|")[-2])
