"""Judged pairs of made-up arguments, in the two files that `ArgumentPairSource` reads."""

from __future__ import annotations

import gzip
import json
from itertools import combinations
from pathlib import Path

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


def write_arguments(folder: Path, *, pair_rows=None, argument_rows=None, zipped=False) -> Path:
    files = {"pairs": pair_rows or pairs(), "arguments": argument_rows or arguments()}
    for name, rows in files.items():
        content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
        if zipped:
            (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(content))
        else:
            (folder / f"{name}.jsonl").write_bytes(content)
    return folder
