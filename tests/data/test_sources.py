from __future__ import annotations

import json
import pickle
from collections import Counter

import pyarrow
import pytest
from pyarrow import parquet

from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    PromptRecord,
    prompt_key,
)
from rlhf_lightning.data.sources import FileSource, HubSource, MixedSource
from rlhf_lightning.data.splits import split_by_prompt

PAIRS = [
    {"prompt": f"p{i // 3}", "chosen": f"good {i}", "rejected": f"bad {i}", "margin": i / 10}
    for i in range(60)
]
RECORDS = [
    PreferenceRecord(r["prompt"], r["chosen"], r["rejected"], "", r["margin"]) for r in PAIRS
]


class ListSource:
    def __init__(self, records, validation=()):
        self.by_split = {"train": list(records), "validation": list(validation)}

    def records(self, kind, split):
        return self.by_split[split]


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(str(v) for v in row.values()) for row in rows)]
        path.write_text("\n".join(lines))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("extension", ["jsonl", "json", "csv", "parquet"])
def test_every_kind_of_file_gives_the_same_records(tmp_path, extension):
    path = write(tmp_path / f"pairs.{extension}", PAIRS)
    source = FileSource(path, validation_fraction=0)
    assert source.records("preferences", "train") == RECORDS
    assert source.records("preferences", "validation") == []


def test_a_parquet_file_holds_conversations_and_nulls(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "hi"}], "domain": None},
        {"prompt": [{"role": "user", "content": "ho"}], "domain": "d"},
    ]
    path = write(tmp_path / "prompts.parquet", rows)
    records = FileSource(path, validation_fraction=0).records("prompts", "train")
    assert [(r.prompt[0]["content"], r.domain) for r in records] == [("hi", ""), ("ho", "d")]


def test_a_csv_cell_may_hold_line_breaks_and_an_empty_margin(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('prompt,chosen,rejected,margin\np,"a\nb",c,\n')
    records = FileSource(path, validation_fraction=0).records("preferences", "train")
    assert records == [PreferenceRecord("p", "a\nb", "c")]


def test_blank_lines_and_a_byte_order_mark_are_no_records(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n  \n{"prompt": "b"}\n')
    records = FileSource(path, validation_fraction=0).records("prompts", "train")
    assert records == [PromptRecord("a"), PromptRecord("b")]


def test_a_file_is_split_by_prompt_without_a_leak(tmp_path):
    source = FileSource(write(tmp_path / "a.jsonl", PAIRS), validation_fraction=0.3, seed=1)
    train = source.records("preferences", "train")
    validation = source.records("preferences", "validation")
    assert sorted(train + validation, key=lambda r: r.margin) == RECORDS
    assert validation
    assert not {prompt_key(r) for r in train} & {prompt_key(r) for r in validation}


def test_a_prompt_is_held_out_from_every_kind_alike(tmp_path):
    path = write(tmp_path / "a.jsonl", PAIRS)
    kinds = ("preferences", "demonstrations", "prompts")
    held_out = [
        {
            prompt_key(r)
            for r in FileSource(path, validation_fraction=0.3, seed=1).records(k, "validation")
        }
        for k in kinds
    ]
    assert held_out[0] == held_out[1] == held_out[2]


def test_prompts_taken_from_pairs_come_once_each_and_keep_their_order(tmp_path):
    source = FileSource(write(tmp_path / "a.jsonl", PAIRS), validation_fraction=0)
    prompts = source.records("prompts", "train")
    assert [p.prompt for p in prompts] == [f"p{i}" for i in range(20)]
    assert prompts[0].columns["chosen"] == "good 0"


def test_a_set_of_prompts_is_kept_as_it_is(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}])
    records = FileSource(path, validation_fraction=0).records("prompts", "train")
    assert [r.prompt for r in records] == ["a", "b", "a"]


def test_a_folder_with_split_files_is_not_split_again(tmp_path):
    write(tmp_path / "train.jsonl", PAIRS[:30])
    write(tmp_path / "validation.csv", PAIRS[30:])
    source = FileSource(tmp_path)
    assert source.records("preferences", "train") == RECORDS[:30]
    assert source.records("preferences", "validation") == RECORDS[30:]


def test_shards_of_a_folder_are_joined_in_order(tmp_path):
    (tmp_path / "data").mkdir()
    for i in range(2):
        rows = PAIRS[30 * i : 30 * i + 30]
        write(tmp_path / "data" / f"train-{i:05}-of-00002.parquet", rows)
    source = FileSource(tmp_path, validation_fraction=0)
    assert source.records("preferences", "train") == RECORDS


def test_a_validation_file_that_shares_prompts_is_reported(tmp_path, caplog):
    train = write(tmp_path / "a.jsonl", PAIRS[:30])
    validation = write(tmp_path / "b.jsonl", PAIRS[27:36])
    source = FileSource(train, validation_path=validation)
    assert source.records("preferences", "validation") == RECORDS[27:36]
    assert "1 of 3 validation prompts are trained on too" in caplog.text


def lines(*rows):
    return "\n".join(rows)


BAD_FILES = {
    "not JSON": ("a.jsonl", lines('{"prompt": "a"}', '{"prompt": "a"'), "line 2: it is not JSON"),
    "not an object": ("a.jsonl", "[1]", "line 1: found a list"),
    "empty JSONL": ("a.jsonl", "\n\n", "holds no records"),
    "empty JSON": ("a.json", "", "holds no records"),
    "empty list": ("a.json", "[]", "holds no records"),
    "empty CSV": ("a.csv", "prompt\n", "holds no records"),
    "empty Parquet": ("a.parquet", "", "not a Parquet file"),
    "JSON lines in .json": ("a.json", lines('{"a": 1}', '{"a": 2}'), "name the file .jsonl"),
    "an object in .json": ("a.json", '{"prompt": "a"}', "found an object"),
    "a bad row in .json": ("a.json", '[{"prompt": "a"}, 3]', "record 2: found the number 3"),
    "too many cells": ("a.csv", "prompt,domain\na,b,c\n", "line 2: .*more cells than the 2 head"),
    "too few cells": ("a.csv", "prompt,domain\na\n", "line 2: .*fewer cells than the 2 headers"),
    "unknown extension": ("a.txt", "hello", "extension '.txt' is unknown.*.jsonl, .json, .csv"),
    "no extension": ("a", "hello", "extension '' is unknown"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_names_itself_and_how_to_mend_it(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(BadRecordError, match=message) as error:
        FileSource(path).records("prompts", "train")
    assert str(error.value).startswith(str(path))
    assert "Fix: " in str(error.value)


@pytest.mark.parametrize("extension", ["jsonl", "json", "csv"])
def test_a_file_that_is_not_utf8_is_named(tmp_path, extension):
    path = tmp_path / f"a.{extension}"
    path.write_bytes('{"prompt": "caf\u00e9"}'.encode("latin-1"))
    with pytest.raises(BadRecordError, match="not UTF-8"):
        FileSource(path).records("prompts", "train")


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path):
    write(tmp_path / "pairs.jsonl", PAIRS)
    with pytest.raises(BadRecordError, match=r"no such file.*did you mean .*pairs\.jsonl"):
        FileSource(tmp_path / "pair.jsonl").records("preferences", "train")


def test_a_missing_validation_file_is_an_error_too(tmp_path):
    path = write(tmp_path / "pairs.jsonl", PAIRS)
    with pytest.raises(BadRecordError, match="no such file"):
        FileSource(path, validation_path=tmp_path / "no.csv").records("preferences", "train")


def test_a_folder_without_a_train_file_is_named_with_what_it_holds(tmp_path):
    write(tmp_path / "pairs.jsonl", PAIRS)
    with pytest.raises(BadRecordError, match=r"no train file \(data files found: pairs.jsonl\)"):
        FileSource(tmp_path).records("preferences", "train")


def test_bad_lines_are_skipped_counted_and_named_on_request(tmp_path, write_jsonl):
    path = write_jsonl(['{"prompt": "a"}', "oops", '{"prompt": ""}', '{"prompt": "b"}'])
    source = FileSource(path, validation_fraction=0, on_bad_record="skip")
    assert source.records("prompts", "train") == [PromptRecord("a"), PromptRecord("b")]
    assert len(source.skipped_records) == 2
    assert "line 2: it is not JSON" in source.skipped_records[0]
    assert "line 3: the key 'prompt' is empty" in source.skipped_records[1]


def test_pairs_without_a_prompt_cannot_be_prompts_but_are_skipped_only_once(write_jsonl):
    rows = [{"chosen": "yes", "rejected": "no"}, {"chosen": "a b", "rejected": "a c"}]
    path = write_jsonl(rows)
    with pytest.raises(BadRecordError, match="line 1: the key 'prompt' is empty"):
        FileSource(path, validation_fraction=0).records("prompts", "train")
    source = FileSource(path, validation_fraction=0, on_bad_record="skip")
    for _ in range(2):
        assert [r.prompt for r in source.records("prompts", "train")] == ["a"]
    assert len(source.skipped_records) == 1


def test_a_set_of_the_wrong_kind_is_an_error_even_where_bad_records_are_skipped(write_jsonl):
    source = FileSource(
        write_jsonl([{"prompt": "a", "completion": "b"}]),
        validation_fraction=0,
        on_bad_record="skip",
    )
    with pytest.raises(BadRecordError, match="preferences were asked for.*are demonstrations"):
        source.records("preferences", "train")


def test_an_unknown_split_is_an_error(write_jsonl):
    with pytest.raises(ValueError, match="split='test' is unknown"):
        FileSource(write_jsonl(PAIRS)).records("preferences", "test")


def test_a_bad_record_error_survives_pickling(tmp_path):
    with pytest.raises(BadRecordError) as caught:
        FileSource(tmp_path / "no.csv").records("prompts", "train")
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.where) == (str(caught.value), caught.value.where)


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


def test_a_hub_name_that_is_a_folder_is_loaded_and_split_by_prompt(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "train.jsonl", PAIRS)
    source = HubSource(str(tmp_path), validation_fraction=0.3)
    train = source.records("preferences", "train")
    validation = source.records("preferences", "validation")
    assert len(train) + len(validation) == 60
    assert not {prompt_key(r) for r in train} & {prompt_key(r) for r in validation}


def test_a_hub_set_that_cannot_be_loaded_is_named(monkeypatch):
    import datasets

    def load_dataset(*args, **kwargs):
        raise FileNotFoundError("not on the hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"'org/no' \(config=None, split='train'.*not on the hub"):
        HubSource("org/no").records("prompts", "train")


def test_a_bad_hub_row_is_named_by_set_split_and_row(monkeypatch):
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": ""}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: rows)
    with pytest.raises(BadRecordError, match=r"org/set\[train\], row 2: the key 'prompt' is empty"):
        HubSource("org/set").records("prompts", "train")


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
    [([1], "1 weights for 2 sources"), ([1, 0], "positive"), ([1, float("nan")], "finite")],
)
def test_bad_weights_are_an_error(weights, message):
    with pytest.raises(ValueError, match=message):
        MixedSource([ListSource([]), ListSource([])], weights)


def test_a_mix_with_an_empty_source_is_an_error():
    mixed = MixedSource([ListSource([PromptRecord("a")]), ListSource([])], [1, 1])
    with pytest.raises(ValueError, match="source 1 of the mix has no prompts"):
        mixed.records("prompts", "train")


def test_skipped_records_of_all_sources_are_named_by_the_mix(write_jsonl):
    path = write_jsonl(["oops", '{"prompt": "a"}'])
    source = FileSource(path, validation_fraction=0, on_bad_record="skip")
    mixed = MixedSource([source, ListSource([PromptRecord("b")])], [1, 1])
    assert len(mixed.records("prompts", "train")) == 2
    assert len(mixed.skipped_records) == 1


def test_the_split_moves_no_prompt_when_records_are_added():
    records = [PromptRecord(f"p{i}") for i in range(200)]
    _, before = split_by_prompt(records[:100], validation_fraction=0.2, seed=3)
    _, after = split_by_prompt(records, validation_fraction=0.2, seed=3)
    assert 8 <= len(before) <= 32
    assert [r for r in after if r in records[:100]] == before
    _, other = split_by_prompt(records, validation_fraction=0.2, seed=4)
    assert other != after


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_neither_side_of_a_split_is_empty_with_two_prompts(fraction):
    records = [PromptRecord("a"), PromptRecord("b"), PromptRecord("a")]
    train, validation = split_by_prompt(records, validation_fraction=fraction, seed=0)
    assert train
    assert validation
    assert len(train) + len(validation) == 3


def test_one_prompt_cannot_be_split():
    with pytest.raises(ValueError, match=r"2 records have 1 prompt\(s\).*validation_fraction=0"):
        split_by_prompt([PromptRecord("a")] * 2, validation_fraction=0.5, seed=0)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_out_of_range_is_an_error(fraction):
    with pytest.raises(ValueError, match="must be in"):
        split_by_prompt([PromptRecord("a")], validation_fraction=fraction, seed=0)
