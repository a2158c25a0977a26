"""Measures of how varied answers are, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from rlhf_lightning.functional.diversity import (
    most_common_fraction,
    novel_ngram_shares,
    repeated_ngram_fraction,
    self_bleu,
    unique_fraction,
)


def test_unique_and_most_common_fractions_count_whole_answers():
    answers = ["yes", "no", "yes", "yes", "maybe"]
    assert unique_fraction(answers) == 3 / 5
    assert most_common_fraction(answers) == 3 / 5
    assert most_common_fraction(["a", "b"]) == 1 / 2
    assert unique_fraction([]) == most_common_fraction([]) == 0


def test_novel_ngrams_are_those_of_one_answer_alone_each_counted_once():
    answers = [[1, 2, 3], [1, 2, 4], [5, 5, 5, 5], [6]]
    assert novel_ngram_shares(answers, n=2) == [1 / 2, 1 / 2, 1.0, 0.0]
    assert novel_ngram_shares([[1, 2], [1, 2]], n=2) == [0.0, 0.0]
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        novel_ngram_shares(answers, n=0)


def test_repetition_is_that_inside_a_response_and_not_between_responses():
    assert repeated_ngram_fraction(["abcd", "abcd"], n=2) == 0
    # ab ba ab ba: two of four were there before; "abc" has none; "x" has no pair at all.
    assert repeated_ngram_fraction(["ababa", "abc", "x"], n=2) == pytest.approx((0.5 + 0) / 2)
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        repeated_ngram_fraction(["ab"], n=0)


def test_self_bleu_of_many_is_drawn_by_its_seed_and_that_of_one_is_undefined():
    answers = [f"{i:04d} {i * i:06d}" for i in range(40)]
    first, again, other = (
        self_bleu(answers, n=3, max_references=4, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first < self_bleu(answers, n=3, max_references=39, seed=1)
    assert math.isnan(self_bleu(["abcd", ""], n=4, max_references=10, seed=0))
