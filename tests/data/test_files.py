from __future__ import annotations

import csv
import gzip
import io
import json

import pytest

from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.files import read_rows, split_files
from rlhf_lightning.data.records import PreferenceRecord, PromptRecord
from rlhf_lightning.data.sources.base import FileSource
from tests.builders.record_files import PAIRS, RECORDS, write

ROWS = [
    {"prompt": f"Café {i}, so; \tto | say", "completion": 'a "word"\nand 5 €'} for i in range(5)
]


def table(separator: str) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(ROWS[0]), delimiter=separator)
    writer.writeheader()
    writer.writerows(ROWS)
    return file.getvalue()


@pytest.mark.parametrize("extension", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_every_kind_of_file_gives_the_same_records(tmp_path, extension):
    path = write(tmp_path / f"pairs.{extension}", PAIRS)
    source = FileSource(path, validation_fraction=0)
    assert source.records("preferences", "train") == RECORDS
    assert source.records("preferences", "validation") == []


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv"])
def test_texts_are_utf_8_with_or_without_a_mark_and_perhaps_compressed(tmp_path, name, compressed):
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in ROWS)
    text = {"a.jsonl": lines, "a.json": json.dumps(ROWS)}.get(name)
    text = text or table("\t" if name == "a.tsv" else ",")
    for encoding in ("utf-8", "utf-8-sig"):
        content = text.encode(encoding)
        path = tmp_path / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(content) if compressed else content)
        assert [row for _, row in read_rows(path)] == ROWS


def test_a_parquet_file_holds_conversations_and_nulls(tmp_path):
    asked = (("hi", None), ("ho", "d"))
    rows = [{"prompt": [{"role": "user", "content": t}], "domain": d} for t, d in asked]
    path = write(tmp_path / "prompts.parquet", rows)
    records = FileSource(path, validation_fraction=0).records("prompts", "train")
    assert [(r.prompt[0]["content"], r.domain) for r in records] == [("hi", ""), ("ho", "d")]


def test_a_csv_cell_may_hold_line_breaks_and_an_empty_margin(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('prompt, chosen,rejected,margin\np,"a\nb",c,\n')
    records = FileSource(path, validation_fraction=0).records("preferences", "train")
    assert records == [PreferenceRecord("p", "a\nb", "c")]


def test_blank_lines_are_no_records(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n  \n{"prompt": "b\u2028c"}\n')
    records = FileSource(path, validation_fraction=0).records("prompts", "train")
    assert records == [PromptRecord("a"), PromptRecord("b\u2028c")]


BAD_FILES = {
    "not JSON": ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "a"', "line 2: .*JSON"),
    "not an object": ("a.jsonl", b"[1]", "line 1: found a list"),
    "lines in .json": ("a.json", b'{"prompt": "a"}\n{"prompt": "b"}\n', r"a\.json: .*\.jsonl"),
    "an object in .json": ("a.json", b'{"data": [{"prompt": "a"}]}', "found an object"),
    "a bad row in .json": ("a.json", b'[{"prompt": "a"}, 3]', "record 2: found the number 3"),
    "empty JSONL": ("a.jsonl", b"\n\n", "no records"),
    "empty Parquet": ("a.parquet", b"", "cannot be read"),
    "too many cells": ("a.csv", b"prompt,domain\na,b,c\n", "line 2: .*2 headers"),
    "too few cells": ("a.csv", b'prompt,domain\n"a\nb",c\nd\n', "line 4: .*2 headers"),
    "a column twice": ("a.csv", b"prompt,prompt\na,b\n", "twice"),
    "latin-1": ("a.jsonl", '{"prompt": "caf\u00e9"}'.encode("latin-1"), "not UTF-8"),
    "cut": ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}' * 99)[:-12], "not whole"),
    "a workbook": ("a.xlsx", b"PK\x03\x04", r"'\.xlsx' is unknown.*\.jsonl, \.json, \.csv"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_names_itself_and_how_to_mend_it(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadRecordError, match=message) as error:
        FileSource(path).records("prompts", "train")
    assert str(error.value).startswith(str(path))
    assert "Fix: " in str(error.value)


def test_an_index_that_pandas_wrote_is_no_label(tmp_path):
    (tmp_path / "a.csv").write_text(",prompt,completion\n0,a,b\n1,c,d\n2,e,f\n")
    source = FileSource(tmp_path / "a.csv", validation_fraction=0.0)
    assert len(source.records("demonstrations", "train")) == 3


def test_a_folder_with_split_files_is_not_split_again(tmp_path):
    write(tmp_path / "train.jsonl", PAIRS[:30])
    write(tmp_path / "validation.csv", PAIRS[30:])
    source = FileSource(tmp_path)
    assert source.records("preferences", "train") == RECORDS[:30]
    assert source.records("preferences", "validation") == RECORDS[30:]


@pytest.mark.parametrize(
    ("names", "train", "validation"),
    [
        (["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"], 2, 0),
        (["train-00000-of-00001-0123456789abcdef.parquet", "test-00000-of-00001.parquet"], 1, 1),
        (["data/train.jsonl", "dev.csv", "test.csv", "train_2023.jsonl"], 1, 1),
    ],
)
def test_the_files_of_a_split_are_those_of_its_name(tmp_path, names, train, validation):
    (tmp_path / "data").mkdir()
    for name in names:
        (tmp_path / name).touch()
    assert [len(files) for files in split_files(tmp_path)] == [train, validation]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["pairs.jsonl"], "no train file.*pairs.jsonl"),
        (["train.csv", "train.jsonl"], "not the shards of one set: train.csv, train.jsonl"),
        (["train.csv", "data/train.csv"], "shards of one set: data/train.csv, train.csv"),
        (["train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"], "these 2 files.*of-00003"),
        (["dataset_dict.json"], "save_to_disk.*load_from_disk.*to_parquet"),
        (["state.json", "data-00000-of-00001.arrow"], "save_to_disk"),
    ],
)
def test_a_folder_whose_training_files_are_not_told_is_refused(tmp_path, names, message):
    (tmp_path / "data").mkdir()
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(BadRecordError, match=message):
        FileSource(tmp_path).records("preferences", "train")
