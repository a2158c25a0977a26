"""Messages that lost their type in a cell of text."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_lightning.data.conversations import messages_in
from rlhf_lightning.data.errors import BadRecordError, Location
from rlhf_lightning.data.sources.base import FileSource
from rlhf_lightning.data.sources.given import GivenRows

WHERE = Location("f", 1)
ODD = "it's } {'x'} [1] array(2, dtype=object) \"so\"\nnext\tline \\ é"
MESSAGES = [
    {"role": "user", "content": ODD},
    {"content": "b" * 90, "role": "assistant", "name": None},
    {"role": "user", "content": "c"},
]


def array(values: list[Any]) -> Any:
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


WRITTEN = {
    "json": json.dumps(MESSAGES),
    "json, indented": json.dumps(MESSAGES, indent=1),
    "json in json": json.dumps(json.dumps(MESSAGES)),
    "json in json in json": json.dumps(json.dumps(json.dumps(MESSAGES))),
    "repr": repr(MESSAGES),
    "tuple": repr(tuple(MESSAGES)),
    "str of numpy": str(array(MESSAGES)),
    "str of numpy, one line": str(array(MESSAGES)).replace("\n", " "),
    "repr of numpy": repr(array(MESSAGES)),
    "repr of numpy, Windows": repr(array(MESSAGES)).replace("\n", "\r\n"),
}


@pytest.mark.parametrize("form", WRITTEN)
def test_messages_are_read_as_they_were_before_they_were_printed(form):
    assert messages_in(WRITTEN[form], "prompt", WHERE) == MESSAGES


@pytest.mark.parametrize("dump", [json.dumps, repr, lambda m: str(array(m))])
def test_a_message_may_begin_with_any_key(dump):
    given = [{"name": "x", "weight": 1, "content": "q", "role": "user"}]
    assert messages_in(dump(given), "prompt", WHERE) == given


def test_arrays_inside_of_messages_and_nan_are_values():
    given = [{"role": "user", "content": "q", "parts": array([1, "x"]), "weight": float("nan")}]
    (found,) = messages_in(str(array(given)), "prompt", WHERE)
    assert found == {"role": "user", "content": "q", "parts": [1, "x"], "weight": None}


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ann", "age": 3}',
        '[{"name": "Ann"}]',
        '["a", "b"]',
        '{"role": "admin"}',
        '[{"content": "x", "type": "text"}]',
        "[{'a': 1} {'b': 2}]",
        "{{ user }}",
        "[INST] hello [/INST]",
        "[1 2 3]",
        "null",
        "The role: user, content: none",
    ],
)
def test_any_other_text_stays_as_it_is(text):
    assert messages_in(text, "completion", WHERE) == text


def test_messages_that_are_cut_off_are_named():
    with pytest.raises(BadRecordError, match="'prompt'"):
        messages_in(repr(MESSAGES)[:-30], "prompt", WHERE)


@pytest.mark.parametrize("dump", [json.dumps, repr, lambda m: str(array(m))])
def test_a_table_of_conversations_is_the_same_set_as_its_lists(dump, tmp_path: Path):
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{ODD} {i}"}],
            "chosen": [{"role": "assistant", "content": f"yes, {ODD}"}],
            "rejected": [{"role": "assistant", "content": "no"}],
        }
        for i in range(4)
    ]
    path = tmp_path / "pairs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({key: dump(value) for key, value in row.items()} for row in rows)
    found = FileSource(path, validation_fraction=0.0).records("preferences", "train")
    wanted = GivenRows(rows, validation_fraction=0.0).records("preferences", "train")
    assert found == wanted


def completion_of(prompt: Any, completion: str, **more: Any) -> Any:
    rows = [{"prompt": prompt, "completion": completion, **more}]
    (record,) = GivenRows(rows, validation_fraction=0.0).records("demonstrations", "train")
    return record.completion


def test_an_array_of_messages_is_a_list():
    message = {"role": "assistant", "content": "hi"}
    prompt = array([{"role": "user", "content": "Hi."}])
    assert completion_of(prompt, array([message])) == (message,)


@pytest.mark.parametrize(
    ("prompts", "count"), [(['["q"]', '["p", "r"]'], 1), (['"q"'], 1), (['["q"]', "p"], 0)]
)
def test_prompts_that_are_all_texts_in_json_are_named(prompts, count, caplog):
    GivenRows([{"prompt": one} for one in prompts], validation_fraction=0.0).records(
        "prompts", "train"
    )
    assert len(caplog.records) == count


@pytest.mark.parametrize("completion", [[{}], [None], [{"content": "x"}], ["x"], [1]])
def test_a_list_that_holds_no_messages_is_a_bad_record(completion):
    with pytest.raises(BadRecordError, match="completion"):
        completion_of("Say hi.", completion)


def test_json_that_a_prompt_asked_for_stays_text_and_a_cell_beside_a_plain_prompt_is_named():
    dialogue = json.dumps(MESSAGES)
    assert completion_of("Write a dialogue as JSON.", dialogue) == dialogue
    one = json.dumps([{"role": "assistant", "content": "hi"}])
    with pytest.raises(BadRecordError, match="'prompt' is plain but 'completion'"):
        completion_of("Say hi.", one)
    assert completion_of("Say hi.", one, rendered=True) == one
    assert completion_of(json.dumps([{"role": "user", "content": "Hi."}]), one) == (
        {"role": "assistant", "content": "hi"},
    )


def read(kind: Any, row: dict[str, Any], **columns: Any) -> Any:
    source = GivenRows([row], validation_fraction=0.0, columns=columns)
    return source.records(kind, "train")


WHOLE = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "hello"}]
REPEATED = {
    "a text": ({"text": json.dumps(WHOLE)}, "texts"),
    "a conversation beside a plain prompt": ({"prompt": "Else.", "completion": WHOLE}, None),
    "a conversation beside its first message": ({"prompt": WHOLE[:1], "completion": WHOLE}, None),
}


@pytest.mark.parametrize(("row", "kind"), REPEATED.values(), ids=REPEATED)
def test_a_whole_conversation_in_one_key_is_read_as_its_error_says(row, kind):
    key = "text" if kind else "completion"
    with pytest.raises(BadRecordError, match=rf"columns={{messages: {key}, {key}: null"):
        read(kind or "demonstrations", row)
    hidden = {"prompt": None} if "prompt" in row else {}
    (record,) = read("demonstrations", row, messages=key, **{key: None}, **hidden)
    assert (record.prompt, record.completion) == (tuple(WHOLE[:1]), tuple(WHOLE[1:]))


def test_sides_that_repeat_a_conversation_are_read_as_their_error_says():
    sides = {"chosen": WHOLE, "rejected": [WHOLE[0], {"role": "assistant", "content": "no"}]}
    for prompt in ("Something else.", WHOLE[:1]):
        with pytest.raises(BadRecordError, match=r"columns={prompt: null}"):
            read("preferences", {"prompt": prompt, **sides})
        (pair,) = read("preferences", {"prompt": prompt, **sides}, prompt=None)
        assert pair.prompt == tuple(WHOLE[:1])
