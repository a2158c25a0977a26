"""Records of several rounds as one source."""

from __future__ import annotations

from rlhf_lightning.data.datamodules import PreferenceDataModule
from rlhf_lightning.data.records import PreferenceRecord
from rlhf_lightning.data.sources.base import JoinedSource, MixedSource, PreferenceFolder
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
