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
from rlhf_lightning.data.sources.argument_pairs import debate
from rlhf_lightning.data.sources.templates import normalized
from rlhf_lightning.rollout.scorers.verifiable import NumberReward

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"
DATA = Path(os.environ.get("RLHF_DATA", BESIDE))
FILES = {
    "arguments": DATA / "ukpconvarg1",
    "shell_commands": DATA / "tldr_pages" / "examples.jsonl.gz",
    "gsm8k": DATA / "gsm8k" / "train.jsonl",
}
EXPERIMENTS = {
    "arguments": "reward_smollm2_arguments",
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


def test_the_argument_pairs_are_all_there_and_their_ties_are_left_out():
    source = source_of("arguments")
    pairs = [*source.pairs("train"), *source.pairs("validation")]
    assert len(pairs) == 6447
    assert len({pair.topic for pair in pairs}) == 12
    assert len({debate(pair.topic) for pair in pairs}) == 6
    assert sum(pair.gold == "equal" for pair in pairs) == 1078
    assert sum(pair.gold is None for pair in pairs) == 299
    counts = [len(source.records("preferences", s)) for s in ("train", "validation")]
    left_out = [sum(source.left_out("preferences", s).values()) for s in ("train", "validation")]
    assert counts == [3427, 1643]
    assert sum(counts) + sum(left_out) == 6447


def test_the_longer_argument_wins_as_often_in_the_held_out_debates_as_in_all():
    source = source_of("arguments")

    def longer_wins(splits):
        strict = [r for s in splits for r in source.records("preferences", s) if r.subsets]
        unequal = [r for r in strict if len(r.chosen) != len(r.rejected)]
        return sum(len(r.chosen) > len(r.rejected) for r in unequal) / len(unequal)

    assert longer_wins(("train", "validation")) == pytest.approx(0.78, abs=0.005)
    assert longer_wins(("validation",)) == pytest.approx(0.78, abs=0.005)


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
