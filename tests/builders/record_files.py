"""Files of records: pairs, judged arguments, and a model with the files that the examples read."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import datasets
import pyarrow
from pyarrow import parquet

from rlhf_lightning.data.records import PreferenceRecord
from rlhf_lightning.data.sources.base import FileSource
from rlhf_lightning.data.sources.given import GivenRows
from tests.builders.models import VOCABULARY, prompt_rows, tiny_policy, tiny_tokenizer

# Three pairs to a prompt.
PAIRS = [
    {"prompt": f"p{i // 3}", "chosen": f"good {i}", "rejected": f"bad {i}", "margin": i / 10}
    for i in range(60)
]
RECORDS = [
    PreferenceRecord(r["prompt"], r["chosen"], r["rejected"], "", r["margin"]) for r in PAIRS
]
# Debates of made-up arguments.
DEBATES = {
    "tea-or-coffee-": ("Tea or coffee?", {"tea": "Tea", "coffee": "Coffee"}),
    "cats-or-dogs": ("Cats or dogs", {"cats": "Cats!", "dogs": "Dogs"}),
    "sea-or-hills": ("Sea or hills", {"sea": "The sea", "hills": "The hills"}),
}
VOTES = {
    "a1": ["a1"] * 4 + ["a2"],
    "a2": ["a2"] * 5,
    "equal": ["equal"] * 3 + ["a1", "a2"],
    None: ["a1", "a1", "a2", "a2", "equal"],
}
# The labels of the six pairs of four arguments: three preferences, a tie, no majority, one more.
GOLD = ("a1", "a2", "a1", "equal", None, "a2")
NUM_EXAMPLE_ROWS = 60
# Ids of ten prompts, and the prompts.
TEN_ROWS = prompt_rows([3, 7, 1, 5, 8, 2, 4, 6, 9, 2], seed=4)
TEN_PROMPTS = [{"prompt": " ".join(f"w{i}" for i in row)} for row in TEN_ROWS]


def write(path, rows):
    """Write rows in the format of the file's suffix; return the path."""
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(str(v) for v in row.values()) for row in rows)]
        path.write_text("\n".join(lines))
    elif path.suffix == ".arrow":
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def source_of(rows, folder, way):
    """Return the source of rows that are in memory, or in a file of that suffix.

    Ways are "memory", "dataset" and "dataset.json" (a `datasets.Dataset`), ".jsonl" and other
    suffixes, and ".json.parquet", written by `datasets` of what it read as JSON.
    """
    file = folder / f"rows{way}"
    if way.startswith(("dataset.json", ".json.")):
        lines = str(write(folder / "rows.jsonl", rows))
        rows = datasets.load_dataset("json", data_files=lines, split="train", cache_dir=folder)
    if way.startswith("."):
        if way == ".json.parquet":
            rows.to_parquet(file)
        return FileSource(file if file.exists() else write(file, rows), validation_fraction=0.0)
    rows = datasets.Dataset.from_list(rows) if way == "dataset" else rows
    return GivenRows(rows, validation_fraction=0.0)


def arguments() -> list[dict]:
    return [
        {
            "topic": f"{debate}_{side}",
            "id": f"{debate}-{side}-{number}",
            "stance": stance,
            "text": f"{side} " + "is good " * (number + 1),
        }
        for debate, (_, sides) in DEBATES.items()
        for side, stance in sides.items()
        for number in range(4)
    ]


def pairs() -> list[dict]:
    return [
        {
            "topic": f"{debate}_{side}",
            "title": title,
            "arg1": f"{debate}-{side}-{first}",
            "arg2": f"{debate}-{side}-{second}",
            "gold": gold,
            "strict": gold == "a1",
            "votes": [[f"w{i}", vote, "because"] for i, vote in enumerate(VOTES[gold])],
        }
        for debate, (title, sides) in DEBATES.items()
        for side in sides
        for (first, second), gold in zip(combinations(range(4), 2), GOLD, strict=True)
    ]


def write_arguments(folder: Path) -> Path:
    """Write judged pairs in the two files that `ArgumentPairSource` reads."""
    for name, rows in {"pairs": pairs(), "arguments": arguments()}.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def row_text(row: int, count: int) -> str:
    """Return a text of words that differ from row to row."""
    return " ".join(f"w{2 + (row * 7 + i * 5) % (VOCABULARY - 2)}" for i in range(count))


def write_material(folder: Path) -> dict[str, Path]:
    """Write a policy and files of demonstrations, pairs and prompts; return their paths."""
    policy = folder / "policy"
    tiny_policy("llama", max_position_embeddings=2048).model.save_pretrained(policy)
    tiny_tokenizer().save_pretrained(policy)
    rows = {
        "demonstrations": lambda i: {"prompt": row_text(i, 3), "completion": row_text(i + 1, 4)},
        "pairs": lambda i: {
            "prompt": row_text(i, 3),
            "chosen": f"{row_text(i, 3)} w3",
            "rejected": f"{row_text(i, 3)} w4",
        },
        "prompts": lambda i: {"prompt": row_text(i, 3)},
    }
    made = {"policy": policy}
    for name, row in rows.items():
        made[name] = folder / f"{name}.jsonl"
        made[name].write_text("".join(json.dumps(row(i)) + "\n" for i in range(NUM_EXAMPLE_ROWS)))
    return made
