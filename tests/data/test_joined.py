"""Records of several rounds as one source."""

from __future__ import annotations

import pytest

from rlhf_lightning.data.datamodules import PreferenceDataModule
from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.records import PreferenceRecord
from rlhf_lightning.data.sources.base import (
    RELIABILITY,
    FileSource,
    JoinedSource,
    MixedSource,
    PreferenceFolder,
)
from tests.builders.record_files import PAIRS, write
from tests.data.test_sources import ListSource


def pair(prompt: str, chosen: str = "good") -> PreferenceRecord:
    return PreferenceRecord(prompt, chosen, "bad")


def test_what_one_source_holds_out_no_source_trains_on() -> None:
    first = ListSource([pair("a"), pair("b"), pair("c")], [pair("d")])
    second = ListSource([pair("d"), pair("e")], [pair("b")])
    joined = JoinedSource([first, second])
    assert [r.prompt for r in joined.records("preferences", "train")] == ["a", "c", "e"]
    assert joined.left_out("preferences", "train") == {
        "its prompt is held out by another source": 2
    }
    held_out = joined.records("preferences", "validation")
    assert [(r.prompt, r.subsets) for r in held_out] == [("d", ()), ("b", ("source_2",))]


def test_a_record_that_an_earlier_source_has_is_not_counted_twice() -> None:
    first = ListSource([pair("a"), pair("a")])  # repeated on purpose
    joined = JoinedSource([first, ListSource([pair("a"), pair("a", "better")])])
    assert [r.chosen for r in joined.records("preferences", "train")] == ["good", "good", "better"]
    assert joined.left_out("preferences", "train") == {"said in an earlier source": 1}


def test_further_files_add_training_records_and_hold_out_nothing(tmp_path, tokenizer) -> None:
    first = write(tmp_path / "a.jsonl", PAIRS[:30])
    more = write(tmp_path / "b.jsonl", PAIRS[30:])

    def rows(**arguments):
        data = PreferenceDataModule(
            None, tokenizer, batch_size=4, max_length=64, seed=1, num_epochs=1, **arguments
        )
        return {split: len(data.rows(split)) for split in ("train", "validation")}

    alone, both = rows(path=str(first)), rows(path=str(first), also=[str(more)])
    held_out = {r.prompt for r in PreferenceFolder(first).records("preferences", "validation")}
    shared = sum(row["prompt"] in held_out for row in PAIRS[30:])
    assert both["validation"] == alone["validation"]
    assert both["train"] == alone["train"] + len(PAIRS[30:]) - shared


def test_what_the_sources_of_a_mix_leave_out_is_counted():
    class Leaving:
        def records(self, kind, split):
            return [PreferenceRecord(f"p{i}", "a", "b") for i in range(4)]

        def left_out(self, kind, split):
            return {"too long": 3}

    source = MixedSource([Leaving(), Leaving()], [1, 1])
    assert source.left_out("preferences", "train") == {"too long": 6}


def pairs_of(tokenizer, source, path, **arguments):
    """Return the records that take the place of a source's."""
    data = PreferenceDataModule(source, tokenizer, batch_size=2, path=str(path), **arguments)
    return data.source.records(data.kind, "train")


def test_pairs_in_place_of_a_source_are_read_as_its_rows_are(tmp_path, tokenizer):
    how = {"rendered": True, "on_bad_record": "skip", "system_into_user": True}
    source = FileSource("prompts.jsonl", columns={"prompt": "q"}, validation_fraction=0.0, **how)
    rows = [{"q": f"p{i}", "chosen": "good", "rejected": "bad"} for i in range(3)]
    path = write(tmp_path / "pairs.jsonl", [*rows, rows[0] | {"chosen": None}])
    found = pairs_of(tokenizer, source, path)
    assert [(r.prompt, r.rendered, r.origin.skip) for r in found] == [
        (f"p{i}", True, True) for i in range(3)
    ]
    (more,) = PreferenceDataModule(source, tokenizer, batch_size=2, also=[path]).source.sources[1:]
    assert more.records("preferences", "train") == found
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    sides = {k: [{"role": "assistant", "content": k}] for k in ("chosen", "rejected")}
    (pair,) = pairs_of(tokenizer, source, write(tmp_path / "chat.jsonl", [{"q": turns} | sides]))
    assert pair.prompt == ({"role": "user", "content": "s\n\nu"},)


def test_pairs_beside_a_mix_are_read_as_its_sources_are(tmp_path, tokenizer):
    rows = [{"chosen": "good", "rejected": "bad"} | ({"q": f"p{i}"} if i else {}) for i in range(3)]
    path = write(tmp_path / "pairs.jsonl", rows)

    def mix(*seeds):
        how = {"columns": {"prompt": "q"}, "validation_fraction": 0.0, "on_bad_record": "skip"}
        return MixedSource([FileSource(f"{n}.jsonl", seed=n, **how) for n in seeds], [1, 1])

    assert [r.prompt for r in pairs_of(tokenizer, mix(1, 1), path)] == ["p1", "p2"]
    with pytest.raises(ValueError, match=r"pairs.jsonl: the sources of the mix differ in seed"):
        pairs_of(tokenizer, mix(1, 2), path)
    (tmp_path / RELIABILITY).write_text("{}")
    for name in ("train", "validation"):
        write(tmp_path / f"{name}.jsonl", PAIRS[:2])
    assert len(pairs_of(tokenizer, mix(1, 2), tmp_path)) == 2


def test_pairs_in_place_of_a_source_may_have_our_names_and_not_some_of_its(tmp_path, tokenizer):
    columns = {"prompt": "q", "domain": "about"}
    source = FileSource("prompts.jsonl", columns=columns, validation_fraction=0.0, label_good=1)
    pairs = write(tmp_path / "pairs.jsonl", PAIRS)
    assert [r.prompt for r in pairs_of(tokenizer, source, pairs)] == [r["prompt"] for r in PAIRS]
    some = write(tmp_path / "some.jsonl", [{"q": "p", "chosen": "a", "rejected": "b"}])
    with pytest.raises(BadRecordError, match="columns maps 'domain' to the key 'about', which is"):
        pairs_of(tokenizer, source, some)
    rows = [{"q": f"p{n}", "completion": "c", "label": n, "about": "x"} for n in range(2)]
    found = pairs_of(tokenizer, source, write(tmp_path / "rows.jsonl", rows), kind="unpaired")
    assert [(record.label, record.domain) for record in found] == [(False, "x"), (True, "x")]


def test_a_column_of_prompts_that_is_hidden_is_not_hidden_in_what_was_collected(
    tmp_path, tokenizer
):
    source = FileSource("a.jsonl", columns={"prompt": None}, validation_fraction=0.0)
    rows = [{"prompt": "p", "chosen": "so it is good", "rejected": "so it is bad"}]
    for folder in (tmp_path / "mine", tmp_path / "collected"):
        folder.mkdir()
        write(folder / "train.jsonl", rows)
    (tmp_path / "collected" / RELIABILITY).write_text("{}")
    asked = [
        pairs_of(tokenizer, source, tmp_path / name)[0].prompt for name in ("mine", "collected")
    ]
    assert asked == ["so it is", "p"]
