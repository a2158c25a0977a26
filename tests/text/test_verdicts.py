"""Replies of judges, read: each line of the file beside has a reply and what it says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rlhf_lightning.text.verdicts import parse_verdict

REPLIES = [
    json.loads(line)
    for line in Path(__file__).with_name("judge_replies.jsonl").read_text("utf-8").splitlines()
]


def test_a_reply_is_read_only_where_it_is_clear() -> None:
    assert len(REPLIES) > 800
    assert not [row for row in REPLIES if parse_verdict(row["reply"]) != row["verdict"]]


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("B", "B"),
        ("B\nThe second answer is", "B"),
        ("B is better because it", "B"),
        ("[[B]] Answer A is", "B"),
        ("A: correct and short, which", None),
        ("A. The first is", None),
        ("A is better in tone, B", None),
        ("My verdict is A. Or rather, my verdict is B, which", None),
        ("Both have", None),
        ("Tie", "C"),
        ("**Answer A**\n\n- accurate\n- clear", None),
        ("### Answer A\nThe answer correctly", None),
        ("Answer A:\nThe first answer", None),
        ("Answer A", None),
        ("A\n- accurate", None),
        ("Clarity: A is better. Accuracy", None),
        ("1. Helpfulness: A wins.\n2. Accuracy: B", None),
        ("Helpfulness winner: A\nAccuracy", None),
        ("Winner: A for style, B for", None),
        ("I prefer A's", None),
        ("I'd pick A but", None),
        ("A)\nThe", None),
    ],
)
def test_of_a_reply_that_was_cut_off_an_explicit_verdict_alone_counts(reply, verdict) -> None:
    assert parse_verdict(reply, cut_off=True) == verdict


def test_of_a_long_reply_the_last_20000_characters_are_read() -> None:
    assert parse_verdict("[[A]]" + "." * 19_995) == "A"
    assert parse_verdict("[[A]]" + "." * 20_000) is None
    assert parse_verdict("[[A]]" + "." * 30_000 + "[[B]]") == "B"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "unit",
    ["A ", "{", '{"a":', "[[", "verdict: ", "\n", "  ", "<think>", "A is ", "B: 7,5 ", "A", "A\n"],
)
def test_a_long_reply_is_read_in_a_moment(unit) -> None:
    started = time.process_time()
    for cut_off in (False, True):
        parse_verdict(unit * (100_000 // len(unit)), cut_off=cut_off)
    assert time.process_time() - started < 3


@pytest.mark.parametrize("line", ["-", "=", "->", ": -", "- ", "|-"])
def test_a_line_of_signs_below_a_heading_is_read_in_a_moment(line) -> None:
    started = time.process_time()
    assert parse_verdict(f"Verdict\n{line * 60}\nThey differ.\n[[B]]") == "B"
    assert time.process_time() - started < 1
