"""Rows of PandaLM become pairs and labels."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.public_sets import REPEATED, SAME, read_pandalm


def row(first: object, second: object, *votes: int, given: str = "") -> dict:
    annotators = {f"annotator{n}": vote for n, vote in enumerate(votes, start=1)}
    texts = {"instruction": "Add.", "input": given, "response1": first, "response2": second}
    return {"idx": 0, "motivation_app": "sums", "cmp_key": "opt_llama", **texts, **annotators}


def write(path: Path, *rows: dict) -> Path:
    path.write_text(json.dumps(list(rows)))
    return path


def test_rows_of_pandalm_become_pairs_and_labels(tmp_path: Path) -> None:
    path = write(
        tmp_path / "pandalm.json",
        row("4", "5", 1, 1, 0, given="2 + 2"),
        row(True, "False", 2, 2, 2),
        row("same", " same ", 0, 0, 0),
        row("4", "5", 2, 2, 2, given="2 + 2"),
    )
    found = read_pandalm(path)
    assert [(p.prompt, p.first, p.second) for p in found.pairs] == [
        ("Add.\n\n2 + 2", "4", "5"),
        ("Add.", "True", "False"),
    ]
    assert (found.pairs[0].first_source, found.pairs[0].second_source) == ("opt", "llama")
    assert [x.choice for x in found.labels] == ["first", "first", "tie"] + ["second"] * 3
    assert [x.annotator for x in found.labels[:3]] == ["annotator1", "annotator2", "annotator3"]
    assert found.left_out == {SAME: 1, REPEATED: 1}
    assert found.row_counts == ((2, 0, 1), (0, 3, 0), (0, 0, 3), (0, 3, 0))
