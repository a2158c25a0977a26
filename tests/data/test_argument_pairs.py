"""Pairs of arguments: orientation, ties, margins, whole debates held out."""

from __future__ import annotations

from collections import Counter

import pytest

from rlhf_lightning.data.datamodules import PreferenceDataModule
from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.sources.argument_pairs import (
    NO_MAJORITY,
    TIE,
    ArgumentPairSource,
    debate,
)
from tests.builders.record_files import pairs, write_arguments

HELD_OUT = ("cats-or-dogs",)


@pytest.fixture
def source(tmp_path):
    return ArgumentPairSource(write_arguments(tmp_path), held_out=HELD_OUT)


def test_the_more_convincing_argument_is_chosen_whichever_place_it_had(source):
    first, second, *_ = source.records("preferences", "validation")
    assert (first.chosen, first.rejected) == (" cats is good", " cats is good is good")
    # The second pair is labelled a2.
    assert (second.chosen, second.rejected) == (" cats is good is good is good", " cats is good")


def test_the_prompt_names_the_debate_and_the_side(source):
    record = source.records("preferences", "validation")[0]
    assert record.prompt == "Debate: Cats or dogs\nSide taken: Cats!\nArgument:"
    assert record.domain == "cats-or-dogs_cats"


def test_conversations_ask_for_the_argument_as_the_users_message(tmp_path):
    source = ArgumentPairSource(write_arguments(tmp_path), held_out=HELD_OUT, chat=True)
    record = source.records("preferences", "validation")[0]
    (message,) = record.prompt
    assert message["role"] == "user"
    assert message["content"].endswith("Debate: Cats or dogs\nSide taken: Cats!")
    assert record.chosen == ({"role": "assistant", "content": "cats is good"},)


def test_ties_and_pairs_without_a_majority_are_left_out_and_counted(source):
    assert len(source.records("preferences", "train")) == 4 * 4
    assert source.left_out("preferences", "train") == {TIE: 4, NO_MAJORITY: 4}
    assert source.left_out("preferences", "validation") == {TIE: 2, NO_MAJORITY: 2}
    assert source.left_out("prompts", "train") == {}


def test_the_summary_of_the_data_shows_what_was_left_out(source, tokenizer):
    data = PreferenceDataModule(
        source, tokenizer, batch_size=2, max_length=200, seed=1, num_iterations=1
    )
    assert dict(data.summary.dropped) == {TIE: 4, NO_MAJORITY: 4}
    words = data.render_summary().replace("│", " ").split()
    assert f"dropped: {NO_MAJORITY}" in " ".join(words)
    assert {row.subsets for row in data.rows("validation")} == {("strict",), ()}


def test_the_margin_is_the_share_of_votes_for_minus_that_against(tmp_path):
    source = ArgumentPairSource(write_arguments(tmp_path), held_out=HELD_OUT, margin_scale=2.0)
    margins = [r.margin for r in source.records("preferences", "validation")[:2]]
    assert margins == pytest.approx([2.0 * (4 - 1) / 5, 2.0 * 5 / 5])


def test_a_label_against_the_bare_count_of_votes_has_margin_0(tmp_path):
    rows = pairs()
    rows[0] = rows[0] | {"votes": [["w", vote, ""] for vote in ("a2", "a2", "a1", "equal")]}
    source = ArgumentPairSource(write_arguments(tmp_path, pair_rows=rows), held_out=HELD_OUT)
    record = source.records("preferences", "train")[0]
    assert record.margin == 0.0
    assert record.chosen == " tea is good"


def test_no_argument_and_no_debate_stands_on_both_sides(source):
    texts = {}
    for split in ("train", "validation"):
        records = source.records("preferences", split)
        texts[split] = {r.chosen for r in records} | {r.rejected for r in records}
        assert {debate(r.domain) in HELD_OUT for r in records} == {split == "validation"}
    assert not texts["train"] & texts["validation"]


def test_every_side_gives_one_prompt_and_every_argument_one_demonstration(source):
    prompts = source.records("prompts", "train")
    assert Counter(p.domain for p in prompts) == Counter({p.domain: 1 for p in prompts})
    assert len(prompts) == 4
    demonstrations = source.records("demonstrations", "train")
    assert len({d.completion for d in demonstrations}) == len(demonstrations) == 16


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        (["cats-and-dogs"], "did you mean 'cats-or-dogs'"),
        (["cats-or-dogs", "tea-or-coffee", "sea-or-hills"], "leaves none to train on"),
    ],
)
def test_an_unknown_debate_and_all_debates_cannot_be_held_out(tmp_path, held_out, message):
    source = ArgumentPairSource(write_arguments(tmp_path), held_out=held_out)
    with pytest.raises(BadRecordError, match=message):
        source.records("preferences", "train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gold": "b"}, "line 1: the key 'gold' holds the text 'b'"),
        ({"arg1": "nobody"}, "line 1: the key 'arg1' names 'nobody'"),
        ({"title": None}, "line 1: the key 'title' holds null"),
        ({"votes": []}, "line 1: the key 'votes'"),
        ({"votes": [["w0", "a3", ""]]}, "line 1: the key 'votes'"),
        ({"votes": "a1 a1 a2"}, "line 1: the key 'votes'"),
    ],
)
def test_a_bad_pair_is_named_with_its_line_and_key(tmp_path, change, message):
    rows = pairs()
    rows[0] = rows[0] | change
    source = ArgumentPairSource(write_arguments(tmp_path, pair_rows=rows))
    with pytest.raises(BadRecordError, match=message):
        source.records("preferences", "train")


@pytest.mark.parametrize("path", [None, "nowhere"])
def test_a_missing_folder_names_the_override_and_the_public_source(path):
    with pytest.raises(ValueError, match=r"dataset\.path=FOLDER.*UKPConvArg1"):
        ArgumentPairSource(path)
