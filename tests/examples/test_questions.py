"""Questions of MT-bench, Vicuna and self-instruct as prompts."""

from __future__ import annotations

import json
from pathlib import Path

from examples.datasets.questions import QuestionSource


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turns(*texts: str, category: str = "talk") -> dict:
    return {"question_id": 1, "category": category, "turns": list(texts)}


def task(instruction: str, given: str = "", app: str = "Mail") -> dict:
    instances = [{"input": given, "output": "an answer nobody asks for"}]
    return {"motivation_app": app, "instruction": instruction, "instances": instances}


def test_rows_of_all_three_sets_become_prompts_with_their_domains(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", turns("How?"), turns("Why? ", "And then?", category="maths"))
    write(tmp_path / "a.jsonl", task("Shorten this.", "A long text."), task("Write a haiku."))
    source = QuestionSource(tmp_path, validation_fraction=0.0)
    found = [(r.prompt[0]["content"], r.domain) for r in source.records("prompts", "train")]
    assert found == [
        ("Shorten this.\n\nA long text.", "Mail"),
        ("Write a haiku.", "Mail"),
        ("How?", "talk"),
        ("Why?", "maths"),
    ]
    assert source.records("prompts", "validation") == []


def test_a_question_that_stands_twice_is_asked_once_and_on_one_side(tmp_path: Path) -> None:
    file = write(tmp_path / "q.jsonl", *(turns(f"question {n % 20}") for n in range(60)))
    source = QuestionSource(file, validation_fraction=0.3)
    sides = [source.records("prompts", side) for side in ("train", "validation")]
    texts = [{record.prompt[0]["content"] for record in side} for side in sides]
    assert [len(side) for side in sides] == [len(side) for side in texts]
    assert sum(map(len, texts)) == 20
    assert not texts[0] & texts[1]
    assert texts[1]
