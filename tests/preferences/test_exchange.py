"""Pairs and labels survive the way through every format, and foreign files are read."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.preferences.exchange import Collection, read_collection, write_collection
from rlhf_lightning.preferences.judge import SYSTEM, TEMPLATE, JudgePrompt
from rlhf_lightning.preferences.records import Choice, Label, Pair, turns_of
from tests.builders.labels import make_pairs

NOW = "2026-11-02T09:30:00+00:00"
CHAT = Pair.make(
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Largest planet?"}],
    "Jupiter.",
    "I believe it is Saturn.",
    domain="astronomy",
)


def label(pair: Pair, annotator: str, choice: Choice, **values) -> Label:
    return Label(pair.pair_id, annotator, choice, "person", "second", NOW, **values)


def some_labels(pairs: list[Pair]) -> list[Label]:
    """Ann and Bob agree on the first pair and on the third, and differ on the second."""
    return [
        label(pairs[0], "Ann", "second", seconds=3.5, reason="shorter"),
        label(pairs[0], "Bob", "second", margin=2.0),
        label(pairs[1], "Ann", "first"),
        label(pairs[1], "Bob", "second"),
        label(pairs[2], "Ann", "both_bad", reason='<b>"neither"</b>\nreally'),
        label(pairs[2], "Bob", "skip", seconds=1.0),
    ]


@pytest.mark.parametrize("pairs", [make_pairs(3), [*make_pairs(2), CHAT]])
def test_pairs_survive_label_studio_and_labels_survive_their_own_file(tmp_path: Path, pairs):
    found = Collection(tuple(pairs), tuple(some_labels(pairs)))
    write_collection(tmp_path / "all.json", found, format="label_studio")
    write_collection(tmp_path / "all.jsonl", found, format="labels")
    back = read_collection(tmp_path / "all.json", format="auto", known="labels", now=NOW)
    assert (back.pairs, back.labels) == (found.pairs, ())
    back = read_collection(tmp_path / "all.jsonl", format="auto", known="labels", now=NOW)
    assert back.labels == found.labels


def test_the_order_of_a_trl_row_does_not_tell_what_was_chosen(tmp_path: Path):
    file = tmp_path / "trl.jsonl"
    rows = [{"prompt": f"Q{n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(60)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_collection(file, format="auto", known="labels", now=NOW)
    firsts = sum(pair.first.startswith("good") for pair in found.pairs)
    assert 15 < firsts < 45
    for pair, given in zip(found.pairs, found.labels, strict=True):
        assert {"first": pair.first, "second": pair.second}[given.choice].startswith("good")


def test_opposite_rows_of_one_pair_are_two_labels_and_no_majority(tmp_path: Path):
    file, row = tmp_path / "trl.jsonl", {"prompt": "q", "chosen": "a", "rejected": "b"}
    rows = [row, row | {"chosen": "b", "rejected": "a"}, row]
    for count, verdicts in ((2, 0), (3, 1)):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
        found = read_collection(file, format="auto", known="labels", now=NOW)
        assert len({label.annotator for label in found.labels}) == count
        assert write_collection(tmp_path / "out", found, format="trl")[0] == verdicts


def test_raters_of_other_tools_are_not_given_the_right_answer(tmp_path: Path):
    pair = Pair.make("q", "a", "b", columns={"answer": "forty-two"})
    write_collection(tmp_path / "c.json", Collection((pair,), ()), format="label_studio")
    assert "forty-two" not in (tmp_path / "c.json").read_text()


def test_raters_of_other_tools_are_shown_the_documents_of_a_prompt(tmp_path: Path):
    pair = Pair.make(CHAT.prompt, "a", "b", columns={"documents": '[{"text": "forty-two"}]'})
    write_collection(tmp_path / "c.json", Collection((pair,), ()), format="label_studio")
    (task,) = json.loads((tmp_path / "c.json").read_text())
    assert "forty-two" in task["data"]["prompt"]


def test_an_export_of_label_studio_is_read(tmp_path: Path):
    """A task in the form of its documents, with accounts, lead time and an opened annotation."""
    selected = {"type": "pairwise", "value": {"selected": "right"}, "from_name": "pw"}
    file = tmp_path / "project.json"
    task = {
        "id": 1,
        "data": {"prompt": "Q", "answer1": "left one", "answer2": "right one"},
        "annotations": [
            {"result": [selected], "completed_by": 10, "lead_time": 4.288, "was_cancelled": False},
            {"result": [], "completed_by": {"id": 11, "email": "bob@example.org"}},
            {
                "result": [selected],  # chosen before the annotator skipped the task
                "completed_by": {"email": "bob@example.org"},
                "was_cancelled": True,
                "created_at": "2021-03-09T22:16:08.728353Z",
            },
        ],
        "predictions": [],
    }
    file.write_text(json.dumps([task]))
    found = read_collection(file, format="auto", known="labels", now=NOW)
    assert found.pairs == (Pair.make("Q", "left one", "right one"),)
    told = [(x.annotator, x.choice, x.seconds, x.created) for x in found.labels]
    assert told == [
        ("10", "second", 4.288, NOW),
        ("bob@example.org", "skip", None, "2021-03-09T22:16:08.728353Z"),
    ]


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        ([("left", None, 1), (None, "tie", 1)], None),
        ([("left", "tie", 1)], "record 1.*verdicts first, tie"),
        ([("left", None, None), ("right", None, None)], "completed_by"),
    ],
)
def test_annotations_that_do_not_tell_verdict_or_person_are_refused(tmp_path, annotations, message):
    given = []
    for selected, choice, person in annotations:
        parts = [{"type": "pairwise", "value": {"selected": selected}}] if selected else []
        parts += [{"type": "choices", "value": {"choices": [choice]}}] if choice else []
        given.append({"result": parts, "completed_by": person})
    data = {"prompt": "Q", "answer1": "a", "answer2": "b"}
    (tmp_path / "a.json").write_text(json.dumps([{"data": data, "annotations": given}]))
    with pytest.raises(BadRecordError, match=message) if message else nullcontext():
        found = read_collection(tmp_path / "a.json", format="auto", known="labels", now=NOW)
        assert [label.choice for label in found.labels] == ["first", "tie"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"wrong": 1}\n', r"a\.jsonl, line 1: the keys wrong tell no format"),
        ("a.json", '[{"data": {"question": "Q", "text1": "a"}}]', "prompt, answer1 and answer2"),
    ],
)
def test_a_bad_file_is_told_with_place_and_fix(tmp_path: Path, name: str, text: str, message: str):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(BadRecordError, match=message) as caught:
        read_collection(file, format="auto", known="labels", now=NOW)
    assert "Fix: " in str(caught.value)


def test_pairs_of_trl_keep_the_variables_of_their_template(tmp_path: Path):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    row = {
        "prompt": [{"role": "user", "content": "weather?"}],
        "chosen": [{"role": "assistant", "content": "Rain."}],
        "rejected": [{"role": "assistant", "content": "Sun."}],
    }
    given = tmp_path / "given.jsonl"
    given.write_text(json.dumps(row | {"tools": tools}) + "\n")
    found = read_collection(given, format="auto", known="labels", now=NOW)
    assert "weather" in dict(turns_of(found.pairs[0]))["tools"]
    asked = JudgePrompt(TEMPLATE, SYSTEM, 1).question(found.pairs[0], "first")[0][-1]
    assert '"name": "weather"' in asked["content"]
    for format, ending in (("trl", "jsonl"), ("label_studio", "json")):
        written = tmp_path / f"written.{ending}"
        write_collection(written, found, format=format)
        (again,) = read_collection(written, format="auto", known="labels", now=NOW).pairs
        assert json.loads(again.columns["tools"]) == tools


CALL = {"name": "f", "arguments": {}}


@pytest.mark.parametrize("more", [{"reasoning_content": "hm"}, {"tool_calls": [CALL]}])
def test_a_response_that_a_pair_cannot_hold_is_refused(tmp_path: Path, more):
    row = {
        "prompt": [{"role": "user", "content": "weather?"}],
        "chosen": [{"role": "assistant", "content": "Rain.", **more}],
        "rejected": [{"role": "assistant", "content": "Sun."}],
    }
    path = tmp_path / "given.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(BadRecordError, match="'chosen' is not one message"):
        read_collection(path, format="auto", known="labels", now=NOW)
