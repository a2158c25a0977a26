from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import threading
from typing import Any

import pyarrow
import pytest

from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.files import read_rows
from rlhf_lightning.data.folders import split_files
from rlhf_lightning.data.records import PreferenceRecord, PromptRecord
from rlhf_lightning.data.sources.base import FileSource
from rlhf_lightning.data.sources.given import as_source
from tests.builders.record_files import PAIRS, RECORDS, write


@pytest.mark.parametrize("extension", ["jsonl", "json", "csv", "parquet", "arrow", "feather"])
def test_every_kind_of_file_gives_the_same_records(tmp_path, extension):
    path = write(tmp_path / f"pairs.{extension}", PAIRS)
    source = FileSource(path, validation_fraction=0)
    assert source.records("preferences", "train") == RECORDS
    assert source.records("preferences", "validation") == []


@pytest.mark.parametrize("wrapper", [{}, {"version": "1.1", "count": 2}])
@pytest.mark.parametrize("key", ["data", "rows", "train"])
def test_rows_under_a_key_of_a_json_file_are_read(tmp_path, key, wrapper):
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(wrapper | {key: PAIRS}))
    source = FileSource(path, validation_fraction=0)
    assert source.records("preferences", "train") == RECORDS


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


def test_a_folder_with_split_files_is_not_split_again(tmp_path):
    write(tmp_path / "train.jsonl", PAIRS[:30])
    write(tmp_path / "validation.csv", PAIRS[30:])
    source = FileSource(tmp_path)
    assert source.records("preferences", "train") == RECORDS[:30]
    assert source.records("preferences", "validation") == RECORDS[30:]


def lines(*rows):
    return "\n".join(rows)


BAD_FILES = {
    "not JSON": ("a.jsonl", lines('{"prompt": "a"}', '{"prompt": "a"'), "line 2: it is not JSON"),
    "not an object": ("a.jsonl", "[1]", "record 1: found the number 1"),
    "a list a line": ("a.jsonl", "[1]\n[2]", "line 1: found a list"),
    "not JSON in .json": ("a.json", '{\n"prompt": "a"\n', "a.json: it is not JSON"),
    "a workbook": ("a.csv", "PK\x03\x04\x14", "Excel.*CSV UTF-8"),
    "Parquet of another name": ("a.jsonl", "PAR1...", "Parquet.*end with .parquet"),
    "a pointer": ("a.jsonl", "version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "JSON in .csv": ("a.csv", '[{"prompt": "a"}]', "begins as JSON does.*end with .jsonl"),
    "a web page": ("a.csv", "<!DOCTYPE html><html>", "web page"),
    "ragged, semicolons": ("a.csv", "prompt;domain\na;b;c\n", "more cells than the 2.*';'"),
    "empty JSONL": ("a.jsonl", "\n\n", "holds no records"),
    "empty JSON": ("a.json", "", "holds no records"),
    "empty list": ("a.json", "[]", "holds no records"),
    "empty CSV": ("a.csv", "prompt\n", "holds no records"),
    "empty Parquet": ("a.parquet", "", "not a Parquet file"),
    "empty Arrow": ("a.arrow", "", "not an Arrow file"),
    "Arrow of another name": ("a.json", "ARROW1...", "Arrow.*end with .arrow"),
    "two lists in .json": ("a.json", '{"train": [{}], "test": [{}]}', "found an object.*orient"),
    "a record with a list": ("a.json", '{"prompt": "a", "answers": [{"text": "b"}]}', "an object"),
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


def test_a_folder_without_a_train_file_is_named_with_what_it_holds(tmp_path):
    write(tmp_path / "pairs.jsonl", PAIRS)
    with pytest.raises(BadRecordError, match=r"no train file \(data files found: pairs.jsonl\)"):
        FileSource(tmp_path).records("preferences", "train")


@pytest.mark.parametrize("damage", ["cut", "a changed byte"])
def test_a_damaged_compressed_file_is_an_error_and_no_shorter_set(tmp_path, damage):
    path = compress(write(tmp_path / "pairs.jsonl", PAIRS))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(path.read_bytes()[:-20] if damage == "cut" else content)
    with pytest.raises(BadRecordError, match="not a whole compressed file"):
        FileSource(path, on_bad_record="skip").records("preferences", "train")


def compress(path):
    target = path.with_name(f"{path.name}.gz")
    target.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return target


@pytest.mark.parametrize(
    ("names", "is_one"),
    [
        (["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"], True),
        (["train-00000-of-00001-0123456789abcdef.parquet"], True),
        (["train_0.jsonl", "train_1.jsonl"], True),
        (["train-part-1.jsonl", "train-part-2.jsonl"], True),
        (["train_prefs-00000-of-00001.parquet", "train_sft-00000-of-00001.parquet"], False),
        (["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"], True),
        (["train_2023.jsonl", "train_2024.jsonl"], False),
        (["train_1.jsonl", "train_3.jsonl"], False),
    ],
)
def test_the_files_of_a_split_are_shards_of_one_set(tmp_path, names, is_one):
    for name in names:
        (tmp_path / name).touch()
    if is_one:
        assert [path.name for path in split_files(tmp_path)[0]] == names
    else:
        with pytest.raises(BadRecordError, match=f"no shards of one set: {names[0]}, {names[1]}"):
            split_files(tmp_path)


def test_what_save_to_disk_wrote_is_read_by_its_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(PAIRS * 3)
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    splits = {"test": rows.select(range(2)), "train": rows}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "both")
    datasets.DatasetDict({"dev": rows}).save_to_disk(tmp_path / "none")
    one = FileSource(tmp_path / "one", validation_fraction=0).records("preferences", "train")
    both = FileSource(tmp_path / "both")
    assert one == both.records("preferences", "train")
    assert len(one) == len(rows)
    assert len(both.records("preferences", "validation")) == 2
    with pytest.raises(BadRecordError, match=r"no split train \(found: dev\).*none/SPLIT"):
        FileSource(tmp_path / "none").records("preferences", "train")
    (tmp_path / "both" / "dataset_dict.json").write_text("[]")
    with pytest.raises(BadRecordError, match="save it anew"):
        FileSource(tmp_path / "both").records("preferences", "train")


@pytest.mark.parametrize(
    ("names", "reads"),
    [
        (["part-0.jsonl", "part-1.jsonl"], True),
        (["data-00000-of-00001.jsonl"], True),
        (["part-0.jsonl", "part-2.jsonl"], False),
        (["test_0.jsonl", "test_1.jsonl"], False),
        (["pairs_2023.jsonl", "pairs_2024.jsonl"], False),
    ],
)
def test_a_folder_of_nothing_but_shards_is_all_for_training(tmp_path, names, reads):
    for name in names:
        (tmp_path / name).touch()
    if reads:
        assert [[path.name for path in files] for files in split_files(tmp_path)] == [names, []]
    else:
        with pytest.raises(BadRecordError, match="no train file"):
            split_files(tmp_path)


def test_a_pattern_is_told_to_be_a_folder(tmp_path):
    for make in (FileSource, as_source):
        with pytest.raises(BadRecordError, match="a pattern is not read: give the folder"):
            make(tmp_path / "*.jsonl").records("preferences", "train")


# -- the content decides, not the name ---------------------------------------------------------

ROWS = [
    {"prompt": f"Café {i}, so; \tto | say", "completion": 'a "word"\nand 5 €'} for i in range(5)
]


def json_lines(newline: str = "\n") -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + newline for row in ROWS)


def table(separator: str, newline: str = "\r\n", **quoting: Any) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(
        file, list(ROWS[0]), delimiter=separator, lineterminator=newline, **quoting
    )
    writer.writeheader()
    writer.writerows(ROWS)
    return file.getvalue()


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


QUOTED = {"quoting": csv.QUOTE_ALL}
CONTENTS = {
    "lines.jsonl": json_lines().encode(),
    "bom.jsonl": json_lines("\r\n").encode("utf-8-sig"),
    "utf16.jsonl": json_lines().encode("utf-16"),
    "utf16_windows.jsonl": json_lines("\r\n").encode("utf-16"),
    "utf16_no_mark.jsonl": json_lines().encode("utf-16-le"),
    "utf32.json": json.dumps(ROWS).encode("utf-32"),
    "utf16.csv": table(",").encode("utf-16"),
    "bom.csv": table(",").encode("utf-8-sig"),
    "list.jsonl": json.dumps(ROWS, indent=1).encode(),
    "list_bom.jsonl": json.dumps(ROWS).encode("utf-8-sig"),
    "lines.json": json_lines().encode(),
    "lines_blank.json": b"\n" + json_lines("\r\n\r\n").encode(),
    "list.json": json.dumps(ROWS).encode(),
    "gzip.jsonl": gzip.compress(json_lines().encode()),
    "gzip_list.jsonl": gzip.compress(json.dumps(ROWS).encode()),
    "gzip_utf16.csv": gzip.compress(table(";").encode("utf-16")),
    "plain.jsonl.gz": json_lines().encode(),
    "bzip2.csv": bz2.compress(table(",").encode()),
    "bzip2.jsonl.bz2": bz2.compress(json_lines().encode()),
    "xz.jsonl": lzma.compress(json_lines().encode()),
    "xz.json.xz": lzma.compress(json_lines().encode()),
    "zstd.jsonl": zstd(json_lines().encode()),
    "zstd.jsonl.zst": zstd(json_lines().encode()),
    "semicolon.csv": table(";").encode("utf-8-sig"),
    "semicolon_quoted.csv": table(";", **QUOTED).encode(),
    "tab.csv": table("\t", "\n").encode(),
    "pipe.csv": table("|", **QUOTED).encode(),
    "tab.tsv": table("\t").encode(),
    "comma.tsv": table(",").encode(),
    "excel.csv": ("sep=;\r\n" + table(";")).encode("utf-8-sig"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_compression_encoding_and_separator_are_told_by_the_content(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(CONTENTS[name])
    assert [row for _, row in read_rows(path)] == ROWS


def test_names_of_columns_may_have_a_space_before_them(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt, domain\na,b\n")
    assert [row for _, row in read_rows(path)] == [{"prompt": "a", "domain": "b"}]


@pytest.mark.parametrize(
    ("name", "separator", "odd"),
    [
        *(("a.csv", separator, "notes, misc") for separator in ";\t|"),
        ("a.csv", ",", "notes; misc | more; and so on"),
        ("a.tsv", "\t", "notes, misc"),
        ("a.tsv", ",", "notes\tmisc"),
    ],
)
@pytest.mark.parametrize("cell", ["x", '"x, y; z\n\n | a ""word""\tb"'])
@pytest.mark.parametrize("count", [1, 30])
def test_the_separator_gives_all_rows_as_many_cells(tmp_path, name, separator, odd, cell, count):
    lines = ["prompt", "completion", odd], *(["q", cell, ""] for _ in range(count))
    (tmp_path / name).write_text("".join(separator.join(line) + "\n" for line in lines))
    rows = [row for _, row in read_rows(tmp_path / name)]
    value = cell.strip('"').replace('""', '"')
    assert rows == [{"prompt": "q", "completion": value, odd: ""}] * count


@pytest.mark.parametrize("name", ["bzip2.csv", "xz.jsonl", "zstd.jsonl", "gzip.jsonl"])
def test_a_compressed_file_of_any_kind_that_was_cut_is_named(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(CONTENTS[name][:-12])
    with pytest.raises(BadRecordError, match="not a whole compressed file"):
        list(read_rows(path))


def test_lines_are_counted_as_an_editor_counts_them(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("sep=;\nprompt;domain\na;b\nc\n")
    with pytest.raises(BadRecordError, match="line 4: "):
        FileSource(path).records("prompts", "train")


def test_a_pipe_is_read_as_a_file_is(tmp_path):
    path = tmp_path / "pipe.jsonl"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(CONTENTS["gzip.jsonl"],))
    writer.start()
    assert [row for _, row in read_rows(path)] == ROWS
    writer.join()


@pytest.mark.parametrize("kind", ["a pipe", "a link to a pipe", "a folder"])
def test_data_that_cannot_be_read_twice_is_refused_before_it_is_opened(tmp_path, kind):
    path = tmp_path / "pipe.jsonl"
    os.mkfifo(path)
    if kind == "a link to a pipe":
        path = tmp_path / "link.jsonl"
        path.symlink_to("pipe.jsonl")
    if kind == "a folder":
        path = tmp_path / "train.jsonl"
        path.mkdir()
    source = FileSource(tmp_path if kind == "a folder" else path)
    with pytest.raises(BadRecordError, match=path.name):
        source.records("prompts", "train")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_a_file_that_grows_is_read_to_the_length_it_had(tmp_path, name):
    path = tmp_path / name
    line = '{"prompt": "a"}\n' if name.endswith("jsonl") else "a\n"
    path.write_text(("" if name.endswith("jsonl") else "prompt\n") + line * 3)
    found = 0
    with path.open("a") as file:
        for _ in itertools.islice(read_rows(path), 9):
            found += 1
            file.write(line * 10_000)
            file.flush()
    assert found == 3


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.json", "rows.jsonl.gz"])
def test_a_row_that_no_tokenizer_survives_is_a_bad_record(tmp_path, name, monkeypatch):
    monkeypatch.setattr("rlhf_lightning.data.files.LONGEST_TEXT", 1000)
    text = "x" * 2000
    row = json.dumps({"prompt": [{"content": text}]})
    content = f'prompt\n"{text}"\n' if name.endswith("csv") else f"{row}\n"
    content = f"[{row}]" if name.endswith("json") else content
    write = gzip.open if name.endswith("gz") else open
    with write(tmp_path / name, "wb") as file:
        file.write(content.encode())
    ((_, found),) = read_rows(tmp_path / name)
    assert isinstance(found, BadRecordError)
    assert "2000 characters" in str(found)
