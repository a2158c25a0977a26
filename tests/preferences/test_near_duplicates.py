"""Near duplicates: cases by hand, and every pair compared one by one."""

from __future__ import annotations

import random

import pytest

from rlhf_lightning.preferences.pairing import (
    jaccard,
    near_duplicates,
    word_grams,
)


def test_a_changed_word_in_a_long_prompt_is_a_near_duplicate_and_in_a_short_one_is_not() -> None:
    long = " ".join(f"w{i}" for i in range(40))
    train = ["what is two plus three ?", long, "nothing like it at all"]
    held_out = ["what is two plus four ?", long.replace("w20", "x"), "What is  two plus three?"]
    found = near_duplicates(train, held_out)
    # 38 grams each, of which the changed word touches 3: 35 shared of 41.
    assert found == [(0, 2, 1.0), (1, 1, 35 / 41)]


@pytest.mark.parametrize(("threshold", "n"), [(0.2, 1), (0.7, 3)])
def test_it_finds_what_comparing_every_pair_finds(threshold: float, n: int) -> None:
    rng = random.Random(1)
    texts = [" ".join(rng.choice("abcd") for _ in range(rng.randint(0, 9))) for _ in range(120)]
    train, held_out = texts[:70], texts[70:]
    expected = []
    for i, text in enumerate(train):
        scores = [jaccard(word_grams(text, n), word_grams(other, n)) for other in held_out]
        if max(scores) >= threshold:
            expected.append((i, scores.index(max(scores)), max(scores)))
    assert expected
    assert near_duplicates(train, held_out, threshold=threshold, n=n) == expected
