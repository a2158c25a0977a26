"""Probabilities of a judge's letters."""

from __future__ import annotations

import math

import pytest

from rlhf_lightning.preferences.judge import letter_probabilities


def test_probabilities_are_among_the_letters_alone() -> None:
    found = letter_probabilities({"A": math.log(0.2), " A": math.log(0.1), "B": math.log(0.3)})
    assert found == pytest.approx({"A": 0.5, "B": 0.5, "C": 0.0})
    assert letter_probabilities({"The": -0.1}) is None
