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


def test_self_bleu_is_one_for_one_answer_and_near_nothing_for_answers_that_share_nothing():
    assert self_bleu(["abcde"] * 3, n=4, max_references=10, seed=0) == pytest.approx(1)
    assert self_bleu(["abcd", "efgh"], n=4, max_references=10, seed=0) == 0
    assert math.isnan(self_bleu(["abcd", ""], n=4, max_references=10, seed=0))


def test_self_bleu_is_that_of_the_formula():
    # "abcd" against "abce": 1-grams 3 / 4; 2-grams (2 + 1) / (3 + 1); equal lengths. The same back.
    expected = math.exp((math.log(3 / 4) + math.log(3 / 4)) / 2)
    got = self_bleu(["abcd", "abce"], n=2, max_references=5, seed=0)
    assert got == pytest.approx(expected)
    # Counts are clipped to the reference's: of "aaaa" against "ab" one 1-gram of four counts, and
    # "ab" against "aaaa" is shorter: exp(1 - 4 / 2).
    got = self_bleu(["aaaa", "ab"], n=1, max_references=5, seed=0)
    assert got == pytest.approx((1 / 4 + 1 / 2 * math.exp(-1)) / 2)


def test_of_two_references_as_near_in_length_the_shorter_one_counts():
    # abcd: no penalty beside abc; abc: that of 4 tokens; abcde: 4 of 5 words, none.
    got = self_bleu(["abcd", "abc", "abcde"], n=1, max_references=5, seed=0)
    assert got == pytest.approx((1 + math.exp(-1 / 3) + 0.8) / 3)


def test_self_bleu_of_many_is_drawn_by_its_seed():
    answers = [f"{i:04d} {i * i:06d}" for i in range(40)]
    first, again, other = (
        self_bleu(answers, n=3, max_references=4, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first < self_bleu(answers, n=3, max_references=39, seed=1)
