"""The journal: what was appended is there after a kill, whole and once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.preferences.records import Journal, Label
from tests.builders.labels import label
from tests.builders.processes import killed_after


def test_what_is_appended_is_read_back_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "labels.jsonl"
    journal = Journal(path, Label)
    assert journal.read() == []
    odd = label("p\ud83d", "ada", "first", reason="line\u2028 break\nand \U0001f600")
    journal.append([odd, label("q", "ada", "tie")])
    journal.append([])
    with path.open("ab") as file:
        file.write(b'{"pair_id": "r", "anno')
    torn = path.read_bytes()
    again = Journal(path, Label)
    assert again.read() == [odd, label("q", "ada", "tie")]
    assert path.read_bytes() == torn  # it may be of another run, which is read alone
    again.append([label("r", "ada", "second")])
    assert [x.pair_id for x in Journal(path, Label).read()] == ["p\ud83d", "q", "r"]


def test_a_line_that_is_something_else_names_its_place(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text('{"pair_id": "r"}\n')
    with pytest.raises(BadRecordError, match=r"line 1: .*'annotator'"):
        Journal(path, Label).read()


def _append_for_ever(path: Path, done: Any) -> None:
    journal = Journal(path, dict)
    number = len(journal.read())
    while True:
        journal.append([{"number": number + i, "text": "x" * 5000} for i in range(7)])
        number += 7
        done.value += 1


def test_killed_in_the_middle_of_writing_it_loses_and_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "numbers.jsonl"
    told = sum(killed_after(3, _append_for_ever, path, wait=n / 1000) for n in range(4))
    numbers = [row["number"] for row in Journal(path, dict).read()]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= 7 * told >= 7 * 12
