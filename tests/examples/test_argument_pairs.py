"""Pairs of arguments: orientation, ties, margins, whole debates held out."""

from __future__ import annotations

import pytest

from examples.datasets.argument_pairs import NO_MAJORITY, TIE, ArgumentPairSource, debate
from tests.builders.record_files import write_arguments

HELD_OUT = ("cats-or-dogs",)


@pytest.fixture
def source(tmp_path):
    return ArgumentPairSource(write_arguments(tmp_path), held_out=HELD_OUT)


def test_the_more_convincing_argument_is_chosen_whichever_place_it_had(tmp_path):
    source = ArgumentPairSource(write_arguments(tmp_path), held_out=HELD_OUT, margin_scale=2.0)
    first, second, *_ = source.records("preferences", "validation")
    assert first.prompt == "Debate: Cats or dogs\nSide taken: Cats!\nArgument:"
    assert first.domain == "cats-or-dogs_cats"
    # The share of votes for minus that against.
    assert [first.margin, second.margin] == pytest.approx([2.0 * (4 - 1) / 5, 2.0 * 5 / 5])
    assert (first.chosen, first.rejected) == (" cats is good", " cats is good is good")
    # The second pair is labelled a2.
    assert (second.chosen, second.rejected) == (" cats is good is good is good", " cats is good")


def test_ties_and_pairs_without_a_majority_are_left_out_and_counted(source):
    assert len(source.records("preferences", "train")) == 4 * 4
    assert source.left_out("preferences", "train") == {TIE: 4, NO_MAJORITY: 4}
    assert source.left_out("prompts", "train") == {}


def test_no_argument_and_no_debate_stands_on_both_sides(source):
    texts = {}
    for split in ("train", "validation"):
        records = source.records("preferences", split)
        texts[split] = {r.chosen for r in records} | {r.rejected for r in records}
        assert {debate(r.domain) in HELD_OUT for r in records} == {split == "validation"}
    assert not texts["train"] & texts["validation"]
