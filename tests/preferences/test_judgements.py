"""Verdicts out of a judge's replies and letter probabilities."""

from __future__ import annotations

import math

import pytest

from rlhf_lightning.preferences.judge import letter_probabilities, parse_verdict


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("A", "A"),
        (" B.", "B"),
        ("**A**", "A"),
        ("[[C]]", "C"),
        ("Answer A", "A"),
        ("A: it is complete.", "A"),
        ("B\nbecause it is right", "B"),
        ("A good answer would be longer.", None),
        ("I think A is fine. But my final verdict is [[B]]", "B"),
        ("At first [[A]] seemed better, but [[B]]", "B"),
        ("Both are fine.\nAnswer: C", "C"),
        ("The winner is **B**", "B"),
        ("My answer is a mystery", None),
        ("The winner is B because it is right", None),
        ("Verdict: (C)", "C"),
        ("tie", "C"),
        ("Neither.", "C"),
        ("It is a tie-break between A and B", None),
        ("A, B, or C", None),
        ("A is better than B.", "A"),
        ("Answer B is the best answer.", "B"),
        ("A is not better.", None),
        ("B is worse", None),
        ("A, B or C.", None),
        ("A, B", None),
        ("My answer is: B, A", None),
        ("A, because B is wrong", "A"),
        ("B, and A is too long", "B"),
        ("", None),
        ("D", None),
    ],
)
def test_a_reply_is_read_only_where_it_is_clear(reply: str, verdict: str | None) -> None:
    assert parse_verdict(reply) == verdict


def test_probabilities_are_among_the_letters_alone() -> None:
    found = letter_probabilities({"A": math.log(0.2), " A": math.log(0.1), "B": math.log(0.3)})
    assert found == pytest.approx({"A": 0.5, "B": 0.5, "C": 0.0})
    assert letter_probabilities({"The": -0.1}) is None
