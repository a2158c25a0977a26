"""Near duplicates: cases by hand, and every pair compared one by one."""

from __future__ import annotations

import random

import pytest

from rlhf_lightning.preferences.pairing import jaccard, near_duplicates, word_grams


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
