"""Transcripts as Anthropic's HH-RLHF writes them, read from files of the user's."""

from __future__ import annotations

import pytest

from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.sources.base import FileSource, HubSource

ASKED = "\n\nHuman: may I?\n\nAssistant: What?\n\nHuman: sing\n\nAssistant:"
ROW = {"chosen": f"{ASKED} Of course you may", "rejected": f"{ASKED} Of course not"}


def test_rendered_transcripts_stay_text_and_no_prompt_ends_inside_an_answer(write_jsonl):
    source = FileSource(write_jsonl([ROW]), validation_fraction=0, rendered=True)
    (pair,) = source.records("preferences", "train")
    assert (pair.prompt, pair.chosen) == (ASKED, " Of course you may")
    assert pair.rejected == " Of course not"
    assert [one.prompt for one in source.records("prompts", "train")] == [ASKED]


@pytest.mark.parametrize("kind", ["prompts", "demonstrations"])
def test_the_prompt_of_a_rendered_pair_is_not_guessed(write_jsonl, kind):
    shared = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    row = {side: f"{shared}It is {side}<|im_end|>" for side in ("chosen", "rejected")}
    given = {"validation_fraction": 0, "rendered": True}
    with pytest.raises(BadRecordError, match=r"line 1: .*prompt ends.*write the key 'prompt'"):
        FileSource(write_jsonl([row]), **given).records(kind, "train")
    whole = {key: text.removeprefix(shared) for key, text in row.items()} | {"prompt": shared}
    (one,) = FileSource(write_jsonl([whole]), **given).records(kind, "train")
    assert one.prompt == shared


def test_dialogues_that_part_before_the_last_answer_are_bad_records(write_jsonl):
    other = "\n\nHuman: may I?\n\nAssistant: No.\n\nHuman: sing\n\nAssistant: la"
    source = FileSource(write_jsonl([{**ROW, "rejected": other}]))
    with pytest.raises(BadRecordError, match=r"line 1: .*expected only the assistant's response"):
        source.records("preferences", "train")


def test_a_file_is_not_looked_for_on_the_hub(write_jsonl):
    path = write_jsonl([ROW])
    with pytest.raises(ValueError, match=r"is a local file.*dataset=files dataset\.path=") as error:
        HubSource(str(path)).records("preferences", "train")
    assert "network" not in str(error.value)
