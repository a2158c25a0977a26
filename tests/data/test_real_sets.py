"""What is true of the real data sets; skipped where their folder is missing.

The folder is taken from RLHF_DATA, or is `shared/data` beside the repository.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from rlhf_lightning.app.config.compose import conf_dir, register
from rlhf_lightning.data.sources.templates import normalized
from rlhf_lightning.rollout.scorers.verifiable import NumberReward

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"
DATA = Path(os.environ.get("RLHF_DATA", BESIDE))
FILES = {
    "shell_commands": DATA / "tldr_pages" / "examples.jsonl.gz",
    "gsm8k": DATA / "gsm8k" / "train.jsonl",
}
EXPERIMENTS = {
    "shell_commands": "sft_smollm2_shell",
    "gsm8k": "sft_smollm2_gsm8k",
}


def source_of(name):
    """Return the source of a data set as its experiment composes it."""
    if not FILES[name].exists():
        pytest.skip(f"the data set is not in {FILES[name]}: set RLHF_DATA to the folder above it")
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        cfg = compose("train", [f"+experiment={EXPERIMENTS[name]}", f"dataset.path={FILES[name]}"])
    return instantiate(cfg.dataset.source)


@pytest.mark.thorough
def test_the_shell_commands_are_all_there_and_no_page_and_no_command_is_on_both_sides():
    source = source_of("shell_commands")
    records = [source.records("demonstrations", s) for s in ("train", "validation")]
    left_out = source.left_out("demonstrations", "validation")
    assert sum(map(len, records)) + sum(left_out.values()) == 32136
    commands = [{normalized(r.completion[0]["content"]) for r in side} for side in records]
    assert not commands[0] & commands[1]
    prompts = [source.records("prompts", s) for s in ("train", "validation")]
    pages = [{r.columns["page"] for r in side} for side in prompts]
    assert not pages[0] & pages[1]
    assert len(prompts[1]) > 1400
    # With the program in the prompt, a prompt has one command but for two of them.
    assert sum(map(len, prompts)) >= sum(map(len, records)) - 2


def test_every_worked_answer_gives_the_right_number_and_loses_its_calculator_notes():
    source = source_of("gsm8k")
    prompts = [*source.records("prompts", "train"), *source.records("prompts", "validation")]
    left_out = [sum(source.left_out("prompts", s).values()) for s in ("train", "validation")]
    assert len(prompts) + sum(left_out) == 7473
    assert len(prompts) > 3000
    completions = [p.columns["completion"] for p in prompts]
    assert not any("<<" in text for text in completions)
    answers = [p.columns["answer"] for p in prompts]
    assert NumberReward()([""] * len(prompts), completions, answer=answers) == [1.0] * len(prompts)
