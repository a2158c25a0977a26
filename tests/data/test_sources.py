from __future__ import annotations

import itertools
import pickle
from collections import Counter

import pytest

from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.records import DemonstrationRecord, PromptRecord, prompt_key
from rlhf_lightning.data.sources.base import FileSource, HubSource, MixedSource, PreferenceFolder
from rlhf_lightning.data.sources.given import as_source
from tests.builders.record_files import PAIRS, RECORDS, write


class ListSource:
    def __init__(self, records, validation=()):
        self.by_split = {"train": list(records), "validation": list(validation)}

    def records(self, kind, split):
        return self.by_split[split]


def test_a_file_is_split_by_prompt_without_a_leak(tmp_path):
    source = FileSource(write(tmp_path / "a.jsonl", PAIRS), validation_fraction=0.3, seed=1)
    train = source.records("preferences", "train")
    validation = source.records("preferences", "validation")
    assert sorted(train + validation, key=lambda r: r.margin) == RECORDS
    assert validation
    assert not {prompt_key(r) for r in train} & {prompt_key(r) for r in validation}


ANSWERS = ("it is red", "it is a dog", "the cat", "the car", "no", "nothing")


def test_pairs_that_imply_their_prompt_leak_no_answer(tmp_path):
    # Sides that begin alike imply a longer prompt: one question then has several.
    rows = [
        {"chosen": f"question {i} ? {a}", "rejected": f"question {i} ? {b}"}
        for i in range(60)
        for a, b in itertools.combinations(ANSWERS, 2)
    ]
    source = FileSource(write(tmp_path / "a.jsonl", rows), validation_fraction=0.1, seed=1)
    train, validation = (
        {r.prompt + a for r in source.records("preferences", split) for a in (r.chosen, r.rejected)}
        for split in ("train", "validation")
    )
    assert validation
    assert not train & validation
    assert len({r.prompt for r in source.records("preferences", "validation")}) > 6
    held_out = {text.split()[1] for text in validation}
    assert not held_out & {text.split()[1] for text in train}


def test_a_validation_file_that_shares_prompts_is_reported(tmp_path, caplog):
    train = write(tmp_path / "a.jsonl", PAIRS[:30])
    validation = write(tmp_path / "b.jsonl", PAIRS[27:36])
    source = FileSource(train, validation_path=validation)
    assert source.records("preferences", "validation") == RECORDS[27:36]
    assert "1 of 3 validation prompts are trained on too" in caplog.text


def test_a_skipped_record_is_told_once_and_not_again_with_the_other_split(tmp_path, caplog):
    good, bad = '{"prompt": "a"}', '{"prompt": 3}'
    (tmp_path / "train.jsonl").write_text(f"{good}\n{bad}\n")
    (tmp_path / "validation.jsonl").write_text(f"{good}\n{good}\n")
    source = FileSource(tmp_path, on_bad_record="skip")
    assert len(source.records("prompts", "validation")) == 2
    (told,) = [r.getMessage() for r in caplog.records if "bad records" in r.getMessage()]
    assert "train.jsonl: skipped 1 bad records, kept 1:" in told
    (tmp_path / "validation.jsonl").write_text(f"{bad}\n")
    with pytest.raises(BadRecordError, match=r"n\.jsonl: .*all 1 were bad.*n\.jsonl.*[^.].$") as e:
        FileSource(tmp_path, on_bad_record="skip").records("prompts", "train")
    assert "train.jsonl" not in str(e.value)


def test_pairs_without_a_prompt_cannot_be_prompts_but_are_skipped_only_once(write_jsonl):
    rows = [{"chosen": "yes", "rejected": "no"}, {"chosen": "a b", "rejected": "a c"}]
    path = write_jsonl(rows)
    with pytest.raises(BadRecordError, match="line 1: the key 'prompt' is empty"):
        FileSource(path, validation_fraction=0).records("prompts", "train")
    source = FileSource(path, validation_fraction=0, on_bad_record="skip")
    for _ in range(2):
        assert [r.prompt for r in source.records("prompts", "train")] == ["a"]
    assert len(source.skipped_records) == 1


def test_hub_rows_come_through_datasets_with_every_choice_passed_on(monkeypatch):
    import datasets

    asked = []

    def load_dataset(path, name=None, split=None, revision=None):
        asked.append((path, name, split, revision))
        return datasets.Dataset.from_list(PAIRS[:30] if split == "train[:30]" else PAIRS[30:])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = HubSource(
        "org/pairs", config="en", split="train[:30]", validation_split="test", revision="abc"
    )
    assert source.records("preferences", "train") == RECORDS[:30]
    assert source.records("demonstrations", "validation")[0] == DemonstrationRecord(
        "p10", "good 30"
    )
    assert asked == [("org/pairs", "en", "train[:30]", "abc"), ("org/pairs", "en", "test", "abc")]


def test_a_hub_set_that_cannot_be_loaded_is_named(monkeypatch):
    import datasets

    def load_dataset(*args, **kwargs):
        raise FileNotFoundError("not on the hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"'org/no' \(config=None, split='train'.*not on the hub"):
        HubSource("org/no").records("prompts", "train")


def test_mixed_shares_match_the_weights_and_repeat_evenly():
    few = [PromptRecord(f"few {i}") for i in range(10)]
    many = [PromptRecord(f"many {i}") for i in range(90)]
    mixed = MixedSource([ListSource(few), ListSource(many)], [1, 3]).records("prompts", "train")
    counts = Counter(r.prompt for r in mixed)
    assert len(mixed) == 100
    assert {counts[r.prompt] for r in few} == {2, 3}
    assert sum(counts[r.prompt] for r in few) == 25
    assert max(counts[r.prompt] for r in many) == 1


def test_mixing_is_a_function_of_the_seed_and_leaves_validation_whole():
    sources = [
        ListSource([PromptRecord(f"{name}{i}") for i in range(9)], [PromptRecord(name)])
        for name in "ab"
    ]

    def mix(seed):
        return MixedSource(sources, [1, 4], seed=seed).records("prompts", "train")

    assert mix(0) == mix(0)
    assert mix(0) != mix(1)
    validation = MixedSource(sources, [1, 4]).records("prompts", "validation")
    assert validation == [PromptRecord("a"), PromptRecord("b")]


@pytest.mark.parametrize(
    ("weights", "message"),
    [([1], "1 weights for 2 sources"), ([1, 0], "must be > 0"), ([1, float("nan")], "nan")],
)
def test_bad_weights_are_an_error(weights, message):
    with pytest.raises(ValueError, match=message):
        MixedSource([ListSource([]), ListSource([])], weights)


def test_a_mix_says_which_held_out_prompts_another_source_trains_on(tmp_path, caplog):
    rows = [{"prompt": f"p{i}"} for i in range(20)]
    path = write(tmp_path / "prompts.jsonl", rows)

    def mix(*fractions):
        caplog.clear()
        sources = [FileSource(str(path), validation_fraction=part) for part in fractions]
        return MixedSource(sources, [1, 1]).records("prompts", "train")

    mix(0.25, 0.25)
    assert "trained on too" not in caplog.text
    mix(0.25, 0.75)
    assert "validation prompts are trained on too" in caplog.text


def test_a_mix_with_an_empty_source_is_an_error():
    mixed = MixedSource([ListSource([PromptRecord("a")]), ListSource([])], [1, 1])
    with pytest.raises(ValueError, match="source 1 of the mix has no prompts"):
        mixed.records("prompts", "train")


READS = [as_source, PreferenceFolder, lambda path: FileSource(path).parsed("train")]


@pytest.mark.parametrize("read", READS)
def test_a_missing_source_is_a_data_error_and_a_missing_file(read, tmp_path):
    path = tmp_path / "nosuch.jsonl"
    with pytest.raises(BadRecordError, match=r"nosuch\.jsonl: .*no such file.*Fix: ") as caught:
        read(path)
    assert isinstance(caught.value, FileNotFoundError)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied)) == (type(caught.value), str(caught.value))
