"""Histograms before and after, and the pairs of a reward model."""

from __future__ import annotations

import re
from typing import Any

from rlhf_lightning.reports.sections import answers_figures, pairs_section
from tests.reports.test_page import Outline

ROLLOUTS: list[dict[str, Any]] = [
    {"iteration": 1, "score": [0, 0, 1, 0], "length": [5, 5, 5, 9], "groups": [2, 2]},
    {"iteration": 5, "score": [1, 1, 1, 1], "length": [5, 5, 5, 9], "groups": [2, 2]},
    {"iteration": 9, "score": [1, 1, 1, 0], "length": [5, 5, 5, 1], "groups": [2, 2]},
]
HELD_OUT: dict[str, Any] = {
    "iteration": 9, "held_out": "answers", "score": [1.5, 2.5], "length": [4, 6],
    "baseline_score": [0.5, None], "baseline_length": [2, 2],
}  # fmt: skip


def test_the_first_and_the_last_rollout_are_before_and_after_where_nothing_was_held_out() -> None:
    (score, length), of = answers_figures(ROLLOUTS)
    assert list(score.legends) == ["iteration 1, mean 0.25", "iteration 9, mean 0.75"]
    assert list(length.legends) == ["iteration 1, mean 6.00", "iteration 9, mean 4.00"]
    assert of.startswith("4 responses")


def test_held_out_responses_go_first_and_a_score_that_is_missing_is_no_score() -> None:
    (score, length), of = answers_figures([*ROLLOUTS, HELD_OUT])
    assert list(score.legends) == ["before, mean 0.50", "after, mean 2.00"]
    assert list(length.legends) == ["before, mean 2.00", "after, mean 5.00"]
    assert of.startswith("2 held-out responses")


PAIRS: dict[str, Any] = {
    "iteration": 3, "held_out": "pairs", "margin": [1.0, 0.5, -0.25, 0.0],
    "reliability": [[0.55, 0.4, 0.1, 0.5, 3], [0.73, 1.0, 0.2, 1.0, 1]],
    "wrong": [{"margin": -0.25, "prompt": "p?", "chosen": "good", "rejected": "bad"}],
}  # fmt: skip


def test_a_reward_model_shows_its_margins_its_reliability_and_its_surest_mistakes() -> None:
    section = pairs_section([PAIRS])
    outline = Outline(section)
    assert "Margins of 4 pairs" in outline.text
    assert "margin -0.25" in outline.text
    assert outline.text.index("p?") < outline.text.index("good") < outline.text.index("bad")
    # Red where the interval leaves out what the model states, which the mark shows.
    bars = re.findall(
        r"states (\d+)\s%, (\d+) pairs?</dt>.*?<i( class='\w+')?.*?<b style=\"left:([\d.]+)",
        section,
        re.S,
    )
    assert bars == [("55", "3", " class='bad'", "55.0"), ("73", "1", " class='undecided'", "73.0")]
