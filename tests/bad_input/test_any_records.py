"""Whatever stands in a file of records: records come out, or an error that says where and why."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_lightning.data.errors import BadRecordError, Location, SkippedRecords
from rlhf_lightning.data.files import read_rows
from rlhf_lightning.data.formats import KNOWN_KEYS, RowParser, parse_rows
from rlhf_lightning.data.kinds import to_kind
from rlhf_lightning.data.records import ROLES, Record, kind_of, text_key
from tests.bad_input.examples import examples

# JSON may spell half of a surrogate pair, which no file can hold as UTF-8.
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(ROLES) | ANY_TEXT,
        "content": ANY_TEXT | PLAIN,
        "name": PLAIN,
    },
)
ANYTHING = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3)
)
CELL = ANY_TEXT | st.lists(MESSAGE, max_size=4) | ANYTHING
KEY = st.sampled_from(KNOWN_KEYS) | st.sampled_from(["promt", "choosen", "score"]) | ANY_TEXT
ROW = st.dictionaries(KEY, CELL, max_size=5)
TEXTUAL = ("texts", "prompts", "demonstrations", "preferences")


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


def is_whole(record: Record) -> bool:
    """Whether the record holds texts that can be written, and nothing else."""
    texts = [getattr(record, key, "") for key in ("text", "prompt", "completion", "chosen")]
    for text in texts:
        text_key(text).encode()
    return kind_of(record) in TEXTUAL


def convert(record: Record, kind: Any) -> None:
    try:
        assert kind_of(to_kind(record, kind)) == kind
    except BadRecordError as error:
        must_tell(error, "set.jsonl")


@examples(20)
@given(st.lists(ROW, min_size=1, max_size=3))
def test_any_rows_are_records_or_are_named(rows):
    try:
        parsed = parse(rows)
    except BadRecordError as error:
        must_tell(error, "set.jsonl")
    else:
        assert len(parsed) == len(rows)
        assert all(map(is_whole, parsed))
    skipped = SkippedRecords("skip")
    located = [(Location("set.jsonl", i + 1), row) for i, row in enumerate(rows)]
    try:
        kept = parse_rows(located, RowParser(), skipped)
    except BadRecordError as error:
        must_tell(error, "set.jsonl: no record is left")
    else:
        assert len(kept) + len(skipped.messages) == len(rows), "a record is gone without a word"
        for record in kept:
            for kind in TEXTUAL:
                convert(record, kind)


def test_a_key_with_half_of_a_character_is_named_in_words_that_a_log_file_takes(caplog):
    row = json.loads('{"prompt\\ude99": "p", "chosen": "a"}')
    with pytest.raises(BadRecordError, match=r"prompt\\ude99") as raised:
        parse([row])
    must_tell(raised.value, "set.jsonl")
    parse([row, {"text": "t"}], "skip")
    assert "prompt\\ude99" in caplog.text
    caplog.text.encode()


NASTY = {  # JSON that is valid, or nearly so, and no record
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


@pytest.mark.parametrize(("line", "found"), NASTY.values(), ids=NASTY)
def test_valid_json_that_no_text_or_number_can_hold_is_named(tmp_path, line, found):
    for name, text in (("pairs.jsonl", line), ("pairs.json", f"[{line}]")):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(BadRecordError) as caught:
            parse_rows(read_rows(path), RowParser(), SkippedRecords("raise"))
        assert found in str(caught.value)
        must_tell(caught.value, str(path))
