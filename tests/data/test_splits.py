from __future__ import annotations

import random

import pytest

from rlhf_lightning.data.records import PromptRecord, prompt_key
from rlhf_lightning.data.splits import connected_keys, split_by_key


def split_by_prompt(records, **options):
    return split_by_key(records, [*map(prompt_key, records)], name="records", **options)


def test_the_split_moves_no_prompt_when_records_are_added():
    records = [PromptRecord(f"p{i}") for i in range(200)]
    _, before = split_by_prompt(records[:100], validation_fraction=0.2, seed=3)
    _, after = split_by_prompt(records, validation_fraction=0.2, seed=3)
    assert 8 <= len(before) <= 32
    assert [r for r in after if r in records[:100]] == before
    _, other = split_by_prompt(records, validation_fraction=0.2, seed=4)
    assert other != after


def test_one_prompt_cannot_be_split():
    with pytest.raises(ValueError, match=r"needs two, and has 1: .*validation_fraction=0"):
        split_by_prompt([PromptRecord("a")] * 2, validation_fraction=0.5, seed=0)


def test_pairs_that_are_added_behind_move_no_held_out_pair_into_training():
    rng = random.Random(7)
    # Three answers to each question, pairs of which imply prompts of their own.
    names = [f"{q}.{i}" for q in rng.sample(range(300), 300) for i in range(3)]
    keys = [f"{rng.random()}" for _ in names]
    texts = [(f"answer {name.split('.')[0]}",) for name in names]
    first = {*connected_keys(keys[::3], texts[::3])}
    order = [*range(0, 900, 3), *(i for i in range(900) if i % 3)]  # a file of 300 grown to 900
    grown = connected_keys([keys[i] for i in order], [texts[i] for i in order])
    assert grown[:300] == keys[::3]
    assert {*grown} == first
