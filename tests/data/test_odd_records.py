"""Empty completions, keys that stand twice, and pairs that contradict each other."""

from __future__ import annotations

import pytest

from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.sources.base import FileSource
from rlhf_lightning.data.summary import data_counts
from tests.data.stages import preferences

ASKED = [{"role": "user", "content": "why?"}]


def said(content):
    return [{"role": "assistant", "content": content}]


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("completion", {"prompt": "why?", "completion": " so"}),
        ("messages", {"messages": [*ASKED, *said("so")]}),
        ("chosen", {"prompt": "why?", "chosen": " so", "rejected": " no"}),
        ("rejected", {"prompt": ASKED, "chosen": said("so"), "rejected": said("no")}),
    ],
)
def test_an_empty_completion_is_an_error_that_names_file_and_line(write_jsonl, key, row):
    whole = row[key]
    hollow = " \n" if isinstance(whole, str) else [*whole[:-1], *said(" \n")]
    path = write_jsonl([row, {**row, key: hollow}])
    kind = "preferences" if "chosen" in row else "demonstrations"
    with pytest.raises(BadRecordError, match=r"data\.jsonl, line 2: .*is empty") as error:
        FileSource(path, validation_fraction=0).records(kind, "train")
    assert "leave the record out" in str(error.value)
    source = FileSource(path, validation_fraction=0, on_bad_record="skip")
    assert len(source.records(kind, "train")) == 1
    assert len(source.skipped_records) == 1


TWICE = '{"prompt": "why?", "completion": " a", "completion": " b"}'
INSIDE = '{"prompt": [{"role": "user", "content": "a", "content": "b"}], "completion": %s}'


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize("twice", [TWICE, INSIDE % '[{"role": "assistant", "content": "so"}]'])
def test_a_row_with_a_key_twice_is_a_bad_record(tmp_path, name, twice):
    good = '{"prompt": "how?", "completion": " so"}'
    rows = [good, twice, good]
    path = tmp_path / name
    path.write_text("\n".join(rows) if name == "rows.jsonl" else f"[{', '.join(rows)}]")
    with pytest.raises(BadRecordError, match="a key twice"):
        FileSource(path, validation_fraction=0).records("demonstrations", "train")
    if name == "rows.json":
        return
    source = FileSource(path, validation_fraction=0, on_bad_record="skip")
    records = source.records("demonstrations", "train")
    assert [record.completion for record in records] == [" so", " so"]
    assert len(source.skipped_records) == 1


def test_pairs_that_contradict_each_other_are_counted_and_shown(write_jsonl, tokenizer):
    pairs = (("why?", " so", " no"), ("why?", " no", " so"), ("why?", " so", " never"))
    keys = ("prompt", "chosen", "rejected")
    rows = [dict(zip(keys, pair, strict=True)) for pair in (*pairs, ("how?", " no", " so"))]

    def read(path):
        return preferences(tokenizer, FileSource(path, validation_fraction=0), batch_size=1)

    data = read(write_jsonl(rows))
    assert "pairs that another one contradicts (A > B and B > A)" in data.render_summary()
    assert data.summary.num_contradictions == 2
    assert data_counts([data.summary]) == {"data/contradicting_pairs": 2.0}
    alone = read(write_jsonl(rows[1:], "others.jsonl"))
    assert "contradicts" not in alone.render_summary()
    assert data_counts([alone.summary]) == {}
