"""Preference pairs, three to a prompt, and a writer of every kind of file."""

from __future__ import annotations

import json

import pyarrow
from pyarrow import parquet

from rlhf_lightning.data.records import PreferenceRecord

PAIRS = [
    {"prompt": f"p{i // 3}", "chosen": f"good {i}", "rejected": f"bad {i}", "margin": i / 10}
    for i in range(60)
]
RECORDS = [
    PreferenceRecord(r["prompt"], r["chosen"], r["rejected"], "", r["margin"]) for r in PAIRS
]


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
