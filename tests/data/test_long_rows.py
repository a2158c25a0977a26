"""A row of gigabytes in a small compressed file ends at a limit, by line."""

from __future__ import annotations

import bz2
import gzip
import resource

import pytest

from rlhf_lightning.data import files
from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.files import checked_rows

MIB = 2**20
BEGINS = {
    "rows.jsonl.gz": b'{"prompt": "a"}\n{"prompt": "',
    "rows.jsonl.bz2": b'{"prompt": "a"}\n{"prompt": "',
    "rows.csv.gz": b"prompt\na\n",
    "quoted.csv.gz": b'prompt\na\n"',
    "list.json.gz": b'[{"prompt": "',
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", BEGINS)
def test_a_row_without_an_end_is_named_and_not_held(name, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_ROW", 2 * MIB)
    monkeypatch.setattr(files, "LARGEST_JSON", 4 * MIB)
    pack = bz2.open if name.endswith("bz2") else gzip.open
    piece = (b"\n" if name.startswith("quoted") else b"").rjust(MIB, b"x")
    with pack(tmp_path / name, "wb") as file:
        file.write(BEGINS[name])
        for _ in range(256):
            file.write(piece)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadRecordError) as told:
        list(checked_rows(tmp_path / name))
    assert name in str(told.value)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 100


def test_a_row_below_the_limit_is_read(tmp_path):
    with gzip.open(tmp_path / "rows.jsonl.gz", "wb") as file:
        file.write(b'{"prompt": "' + b"x" * MIB + b'"}')
    (row,) = [row for _, row in checked_rows(tmp_path / "rows.jsonl.gz")]
    assert len(row["prompt"]) == MIB
