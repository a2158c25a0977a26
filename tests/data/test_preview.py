"""What is read of a source, before anything is trained."""

from __future__ import annotations

import pytest

from rlhf_lightning.data.kinds import TAKEN
from rlhf_lightning.data.preview import preview
from rlhf_lightning.data.records import DemonstrationRecord
from rlhf_lightning.data.sources.given import GivenRows
from rlhf_lightning.data.summary import MASKED, TRAINED, coloured_examples
from tests.builders.encoding import encode_all

PAIR = {"prompt": "why?", "chosen": " so", "rejected": " no"}
PAIRS = {"prompts", "demonstrations", "unpaired"}


def source(rows, **options):
    return GivenRows(rows, validation_fraction=0.0, on_bad_record="skip", **options)


@pytest.mark.parametrize(
    ("row", "kind", "others"),
    [
        ({"text": "a text"}, "texts", set()),
        ({"prompt": "why?", "answer": "4"}, "prompts", set()),
        ({"prompt": "why?", "completion": " so"}, "demonstrations", {"prompts"}),
        ({"prompt": "why?", "completion": " so", "label": True}, "unpaired", PAIRS - {"unpaired"}),
        (PAIR, "preferences", PAIRS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_kind_is_that_of_the_keys_and_the_others_can_be_asked_for(tokenizer, row, kind, others):
    found = preview(source([row]), tokenizer)
    lines = dict(found.lines)
    assert found.kind == kind
    assert lines[kind] == "1 train"
    assert any(name.startswith("prompt tokens") for name in lines) == (kind != "texts")
    assert set(lines.get("kind= may also be", "").split(", ")) - {""} == others
    assert lines.get("columns that a reward function is given") == (
        "answer, prompt" if kind == "prompts" else None
    )
    for other in others:
        read = preview(source([row]), tokenizer, kind=other)
        taken = [
            text for name, text in read.lines if name.startswith(f"rows that are {TAKEN[other]} ")
        ]
        assert taken == [f"{len(read.rows)}"] * ((kind, other) != ("unpaired", "demonstrations"))


def test_lengths_are_whole_rows_and_max_length_drops_what_the_stage_drops(tokenizer):
    rows = [{"prompt": "a" * n, "completion": "b"} for n in (10, 100, 200)]  # and EOS
    lines = dict(preview(source(rows), tokenizer).lines)
    assert lines["whole row tokens, min / median / 95 % / max"] == "12 / 102 / 202 / 202"
    assert lines["max_length"] == "64 drops 2, 128 drops 1, 256 drops 0"
    assert "plain text, written without the chat template" in lines["look at this"]
    records = source(rows).records("demonstrations", "train")
    for limit in (64, 101, 102, 256):
        kept, _ = encode_all(records, tokenizer, max_length=limit)
        told = dict(preview(source(rows), tokenizer, max_length=limit).lines)["max_length"]
        assert told == f"{limit} drops {3 - len(kept)}"


def test_so_many_records_as_are_asked_for_are_encoded_evenly_spaced(tokenizer):
    rows = [{"prompt": f"{n}", "completion": "b"} for n in range(7)]
    found = preview(source(rows), tokenizer, num_rows=4)
    assert [tokenizer.decode(row.input_ids)[0] for row in found.rows] == [*"0135"]


def test_each_fault_has_its_first_place_and_its_count(tokenizer):
    lacking = {"prompt": "why?", "chosen": " so"}
    rows = [PAIR, lacking, PAIR | {"chosen": " no"}, lacking, PAIR | {"rater": "me"}]
    lines = dict(preview(source(rows), tokenizer).lines)
    assert "row 2: the key 'rejected' is missing" in lines["refused, 2"]
    assert "row 3: 'chosen' and 'rejected' are the same" in lines["refused, 1"]
    assert lines["columns that are not read (map them with columns=)"] == "rater 1"


def test_all_turns_of_pairs_are_refused_as_training_does(tokenizer):
    with pytest.raises(ValueError, match="loss_on=all is of demonstrations alone"):
        preview(source([PAIR]), tokenizer, loss_on="all")


def shades(text):
    return [(text.plain[span.start : span.end], span.style) for span in text.spans[1:]]


def test_tokens_are_coloured_by_whether_they_are_learnt_and_nothing_in_them_is_read_by_the_terminal(
    tokenizer,
):
    rows, _ = encode_all([DemonstrationRecord("a[b]", "\x1b[1m\n")], tokenizer, max_length=99)
    (text,) = coloured_examples(rows, tokenizer)
    learnt = [part for part, style in shades(text) if style in TRAINED]
    masked = [part for part, style in shades(text) if style in MASKED]
    assert "".join(masked) == "a[b]"
    assert "".join(learnt) == "\\x1b[1m\\n\n<|im_end|>"
    assert len(masked) > 1
    assert all(
        one[1] != other[1] for one, other in zip(shades(text), shades(text)[1:], strict=False)
    )
