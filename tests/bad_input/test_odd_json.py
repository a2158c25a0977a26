"""JSON that is valid, or nearly so, and no record: an error that says where and why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_lightning.data.errors import BadRecordError, Location, SkippedRecords
from rlhf_lightning.data.files import read_rows
from rlhf_lightning.data.formats import RowParser, parse_rows
from rlhf_lightning.data.records import Record


def parse(rows: list[Any], on_bad_record: Any = "raise") -> list[Record]:
    located = [(Location("set.jsonl", i + 1), row) for i, row in enumerate(rows)]
    return parse_rows(located, RowParser(), SkippedRecords(on_bad_record))


def must_tell(error: BadRecordError, place: str) -> None:
    text = str(error)
    text.encode()  # a log file, summary.json and W&B take UTF-8 only
    assert text.startswith(place)
    assert ". Fix: " in text
    assert "\n" not in text
    assert len(text) < 3000


def test_a_key_with_half_of_a_character_is_named_in_words_that_a_log_file_takes(caplog):
    row = json.loads('{"prompt\\ude99": "p", "chosen": "a"}')
    with pytest.raises(BadRecordError, match=r"prompt\\ude99") as raised:
        parse([row])
    must_tell(raised.value, "set.jsonl")
    parse([row, {"text": "t"}], "skip")
    assert "prompt\\ude99" in caplog.text
    caplog.text.encode()


ODD = {
    "digits": ('{"prompt": "a", "margin": ' + "9" * 5000 + "}", "cannot be read as JSON"),
    "brackets": ("[" * 100_000, "cannot be read as JSON"),
    "half a character": ('{"prompt": "a\\ud800"}', "'prompt' holds half of a character (U+D800)"),
    "half in a message": (
        '{"messages": [{"role": "user", "content": "\\udfff"}]}',
        "the content of messages[0] holds half of a character (U+DFFF)",
    ),
    "a long margin": (
        '{"prompt": "p", "chosen": "a", "rejected": "b", "margin": 1' + "0" * 400 + "}",
        "expected a finite number >= 0",
    ),
}


@pytest.mark.parametrize(("line", "found"), ODD.values(), ids=ODD)
def test_valid_json_that_no_text_or_number_can_hold_is_named(tmp_path, line, found):
    for name, text in (("pairs.jsonl", line), ("pairs.json", f"[{line}]")):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(BadRecordError) as caught:
            parse_rows(read_rows(path), RowParser(), SkippedRecords("raise"))
        assert found in str(caught.value)
        must_tell(caught.value, str(path))
