"""Texts put together from fields: templates, splits by field, what is left out."""

from __future__ import annotations

import json

import pytest

from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.records import DemonstrationRecord, PromptRecord
from rlhf_lightning.data.sources.templates import SEEN, TOO_LONG, TemplateSource

PROMPT = "On {platform}, with {page}: {task}"


def command_rows(num_pages=40):
    return [
        {
            "platform": platform,
            "page": f"tool{page}",
            "task": f"do thing {number}",
            "completion": f"tool{page} --{number} {{{{file}}}} {platform}",
        }
        for page in range(num_pages)
        for platform in ("linux", "osx")
        for number in range(3)
    ]


@pytest.fixture
def path(write_jsonl):
    return write_jsonl(command_rows())


def make(path, **options):
    return TemplateSource(path, **{"prompt": PROMPT, "seed": 1, "split_by": "page", **options})


def both(source, kind="demonstrations"):
    return [source.records(kind, split) for split in ("train", "validation")]


def test_fields_are_put_into_the_users_message_and_braces_of_a_field_stay(path):
    source = make(path, validation_fraction=0, system="You know {platform}.")
    assert source.records("demonstrations", "train")[0] == DemonstrationRecord(
        (
            {"role": "system", "content": "You know linux."},
            {"role": "user", "content": "On linux, with tool0: do thing 0"},
        ),
        ({"role": "assistant", "content": "tool0 --0 {{file}} linux"},),
    )


def test_a_prompt_carries_the_rows_fields_and_its_finished_completion(path):
    source = make(path, validation_fraction=0, domain="platform", completion="${page} {task}")
    record = source.records("prompts", "train")[0]
    assert isinstance(record, PromptRecord)
    assert record.domain == "linux"
    assert record.columns == {
        "platform": "linux",
        "page": "tool0",
        "task": "do thing 0",
        "completion": "$tool0 do thing 0",
    }


def test_a_page_is_held_out_whole_on_every_platform(path):
    train, validation = both(make(path, validation_fraction=0.2), "prompts")
    pages = [{r.columns["page"] for r in side} for side in (train, validation)]
    assert len(train) + len(validation) == 240
    assert 3 <= len(pages[1]) <= 16
    assert not pages[0] & pages[1]
    assert len(validation) == 6 * len(pages[1])


def test_a_file_of_held_out_rows_takes_the_place_of_a_share(write_jsonl, path, tmp_path):
    held_out = [row | {"task": f"{row['task']} again"} for row in command_rows(2)]
    file = tmp_path / "test.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in held_out))
    train, validation = both(make(path, validation_path=file, validation_fraction=0.5), "prompts")
    assert len(train) == 240, "nothing of the train file is held out"
    assert [r.columns["task"] for r in validation] == [row["task"] for row in held_out]
    longest = len("tool0 --0 {{file}} osx")
    source = make(path, validation_path=file, max_completion_chars=longest)
    assert len(source.records("prompts", "validation")) == 6
    assert source.left_out("prompts", "validation") == {TOO_LONG: 6}


def test_held_out_completions_that_training_shows_are_left_out_and_counted(write_jsonl):
    rows = [row | {"completion": "exit  now"} for row in command_rows(20)[::2]] + command_rows(20)
    options = {"validation_fraction": 0.3}
    everything = make(write_jsonl(rows), **options)
    source = make(write_jsonl(rows), unseen_completions=True, **options)
    train, validation = both(source)
    shown = {" ".join(r.completion[0]["content"].split()) for r in train}
    assert "exit now" in shown
    assert not {" ".join(r.completion[0]["content"].split()) for r in validation} & shown
    assert validation
    assert train == both(everything)[0]
    missing = len(both(everything)[1]) - len(validation)
    assert source.left_out("demonstrations", "validation") == {SEEN: missing}
    assert missing >= 3
    assert source.left_out("demonstrations", "train") == {}


def test_long_completions_are_left_out_after_what_is_removed(write_jsonl):
    rows = [
        {"q": "a", "answer": "1 + 1 = <<1+1=2>>2"},
        {"q": "b", "answer": "1 + 1 = <<1+1=2>>2 and so on"},
    ]
    source = TemplateSource(
        write_jsonl(rows),
        prompt="{q}",
        completion="{answer}",
        remove="<<[^<>]*>>",
        max_completion_chars=len("1 + 1 = 2"),
        validation_fraction=0,
    )
    (record,) = source.records("prompts", "train")
    assert record.columns["completion"] == "1 + 1 = 2"
    assert record.columns["answer"] == "1 + 1 = <<1+1=2>>2"
    assert source.left_out("prompts", "train") == {TOO_LONG: 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"platform": "linux", "pages": "x", "task": "t", "completion": "c"}, "mean 'pages'"),
        ({"platform": "linux", "page": "x", "task": " ", "completion": "c"}, "'task' holds"),
        ({"platform": "linux", "page": "x", "task": None, "completion": "c"}, "'task' is missing"),
    ],
)
def test_a_row_without_a_field_is_an_error_or_skipped_and_counted(write_jsonl, row, message):
    file = write_jsonl([*command_rows(3), row])
    with pytest.raises(BadRecordError, match=rf"line 19: .*{message}"):
        make(file).records("prompts", "train")
    source = make(file, on_bad_record="skip", validation_fraction=0)
    assert len(source.records("prompts", "train")) == 18
    assert len(source.skipped_records) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "{page.__class__}"}, "plain names in braces"),
        ({"remove": "("}, "no regular expression"),
        ({"system": "s", "chat": False}, "no system message"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_is_read(options, message):
    with pytest.raises(ValueError, match=message):
        make("nowhere.jsonl", **options)


def test_a_field_called_label_is_a_class_unless_it_is_true_or_false(write_jsonl):
    rows = [{"q": f"q{i}", "label": label} for i, label in enumerate(["sports", "home"])]
    source = TemplateSource(
        write_jsonl(rows), prompt="{q}", completion="{label}", validation_fraction=0
    )
    assert len(source.records("demonstrations", "train")) == 2
