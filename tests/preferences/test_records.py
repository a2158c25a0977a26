"""Candidates, pairs and labels: what they refuse, and that a line gives the same record back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_lightning.data.errors import BadRecordError, Location
from rlhf_lightning.preferences.annotation.page import task_values
from rlhf_lightning.preferences.annotation.store import Task
from rlhf_lightning.preferences.judge import JudgeAnnotator
from rlhf_lightning.preferences.records import (
    Candidate,
    Label,
    Pair,
    from_row,
    name_of,
    read_records,
    readable,
    to_row,
    write_records,
)

CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"})
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    "reasoning_content": "look",
}
RESULT = {"role": "tool", "content": "12", "name": "Ann", "tool_call_id": "c1"}
NOW = "2026-11-02T09:30:00+00:00"


PAIR_NAME = "2d3f88bc7c7b1f1b62c1f394"


CHAT_NAME = "128dcf09f31f79dadafd41ec"


WHERE = Location("labels.jsonl", 3)


def candidate(**changes) -> Candidate:
    values = {"model": "sft", "settings": {"temperature": 0.7}, "seed": 1, "domain": "sums"}
    return Candidate.make("2 + 2 ?", "4", **(values | changes))


def label(**changes) -> Label:
    values = {
        "pair_id": "p",
        "annotator": "ada",
        "choice": "first",
        "kind": "person",
        "order": "second",
        "created": NOW,
    }
    return Label(**(values | changes))


@pytest.mark.parametrize(
    "record",
    [
        candidate(finished=True),
        Candidate.make(CHAT, "vier \u2028 \U0001f600", model="m", settings={}, seed=0),
        Pair.make("q", "a", "b", domain="d", first_source="sft seed=1"),
        Pair.make((*CHAT, CALLING, RESULT), "a", "", columns={"answer": "b"}),
        label(choice="tie", seconds=1.25, reason="both fine", margin=0.0, kind="judge"),
    ],
)
def test_a_record_survives_its_line(record: Candidate | Pair | Label, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, [record, record])
    first, second, end = path.read_text(encoding="utf-8").split("\n")
    assert (first, end) == (second, "")
    assert from_row(type(record), json.loads(first), WHERE) == record
    assert list(read_records(type(record), path)) == [record, record]


def test_names_are_hashes_of_content_so_that_a_second_import_adds_nothing() -> None:
    pair = Pair.make("q", "a", "b", first_source="sft")
    again = Pair.make("q", "a", "b", first_source="elsewhere", domain="d")
    swapped = Pair.make("q", "b", "a")
    assert pair.pair_id == again.pair_id != swapped.pair_id
    assert candidate().response_id == candidate(model="base", seed=5).response_id
    assert candidate().response_id != Candidate.make("2", "4", model="m", settings={}, seed=0)
    # Where one text ends and the next begins matters.
    assert Pair.make("q", "ab", "c").pair_id != Pair.make("q", "a", "bc").pair_id
    # A conversation and the plain text of its last turn are different prompts.
    prompts = (CHAT, CHAT[-1]["content"], CHAT[1:])
    assert len({name_of("prompt", prompt, columns={}) for prompt in prompts}) == 3


def test_responses_to_other_documents_have_other_names() -> None:
    def names(prompt, documents: str) -> tuple[str, str]:
        columns = {"documents": documents, "answer": documents}
        one = Candidate.make(prompt, "yes", model="m", settings={}, seed=0, columns=columns)
        return one.response_id, Pair.make(prompt, "yes", "no", columns=columns).pair_id

    for first, second in zip(names(CHAT, "[1]"), names(CHAT, "[2]"), strict=True):
        assert first != second
    assert names("q", "[1]") == names("q", "[2]")  # a plain prompt is shown none


def test_names_do_not_change_between_versions() -> None:
    assert Pair.make("q", "a", "b").pair_id == PAIR_NAME
    assert name_of("prompt", CHAT, columns={}) == CHAT_NAME


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pair.make("q", "a", "a"), "same text"),
        (lambda: Pair.make("  ", "a", "b"), "prompt is .*, expected a text"),
        (lambda: label(choice="left"), "choice='left' must be 'first'"),
        (lambda: label(seconds=-1.0), "seconds=-1.0 must be >= 0"),
    ],
)
def test_a_record_that_cannot_be_is_refused_with_what_was_wanted(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choise": "first"}, r"labels.jsonl, line 3: .*'choise'.*choice"),
        ({"order": ...}, "'order'"),
    ],
)
def test_a_bad_row_names_its_line(change: dict, message: str) -> None:
    row = {k: v for k, v in (to_row(label()) | change).items() if v is not ...}
    with pytest.raises(BadRecordError, match=message):
        from_row(Label, row, WHERE)


def test_calls_of_tools_can_be_read() -> None:
    call = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"a": "ü"}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    line = '{"name": "f", "arguments": {"a": "ü"}}'
    assert readable((*CHAT, turn)) == f"{readable(CHAT)}\n\nassistant: {line}\n{line}"
    assert readable(({**turn, "content": "Look."},)) == f"assistant: Look.\n{line}\n{line}"
    shown = task_values(Task(Pair.make((*CHAT, turn), "a", "b"), "first"))["turns"]
    assert shown[-1] == ("assistant", f"{line}\n{line}")


def test_raters_and_judges_are_shown_no_thoughts_unless_they_are_kept() -> None:
    pair = Pair.make("p", "<think>a</think>\nYes.", "<think>b</think>\nNo.")
    task = Task(pair, "first")
    assert task_values(task)["answers"] == ["Yes.", "No."]
    assert task_values(task, "keep")["answers"] == [pair.first, pair.second]
    for thoughts, count in (({}, 0), ({"thoughts": "keep"}, 4)):
        judge = JudgeAnnotator(model="m", api_key_env=None, **thoughts)
        asked = judge.prompt.question(pair, "first")[0][-1]["content"]
        assert asked.count("think>") == count
        assert "\nYes.\n" in asked
