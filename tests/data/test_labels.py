"""Rows whose label says that a response is good or bad."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.records import DemonstrationRecord, PromptRecord, UnpairedRecord
from rlhf_lightning.data.sources.given import GivenRows


def rows(name: str, values: Any) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Question {i}?", "completion": f"Response {i}.", name: value}
        for i, value in enumerate(list(values) * 3)
    ]


def records(given: Any, kind: Any, **options: Any) -> list[Any]:
    return GivenRows(given, validation_fraction=0.0, **options).records(kind, "train")


@pytest.mark.parametrize(
    ("name", "values", "options"),
    [
        ("label", (True, False), {}),
        ("label", ("TRUE", "False"), {}),
        ("helps", (True, False), {"columns": {"label": "helps"}}),
        ("label", (1, 0), {"label_good": 1}),
        ("label", ("1", "0"), {"label_good": 1}),
        ("thumbs", ("up", "down"), {"columns": {"label": "thumbs"}, "label_good": "up"}),
        ("is_toxic", (False, True), {"columns": {"label": "is_toxic"}, "label_good": False}),
    ],
)
def test_a_response_that_is_labelled_bad_is_no_demonstration(name, values, options):
    given = rows(name, values)
    with pytest.raises(BadRecordError, match=rf"row 2: .*'{name}'.*on_bad_record=skip.*kto"):
        records(given, "demonstrations", **options)
    good = records(given, "demonstrations", on_bad_record="skip", **options)
    assert [record.completion for record in good] == ["Response 0.", "Response 2.", "Response 4."]
    assert all(type(record) is DemonstrationRecord for record in good)
    assert len(records(given, "demonstrations", **{**options, "columns": {"label": None}})) == 6
    unpaired = records(given, "unpaired", **options)
    assert [record.label for record in unpaired] == [True, False] * 3
    assert all(type(record) is UnpairedRecord for record in unpaired)
    assert not any(record.origin.unread for record in unpaired)


@pytest.mark.parametrize(
    ("good", "spelled", "bad"),
    [("good", "Good", "bad"), ("good", " good", "bad"), (1, 1.0, 0), (1.0, "1", 0.0)],
)
def test_a_label_that_differs_from_the_good_one_in_letters_alone_is_not_read_as_bad(
    good, spelled, bad
):
    with pytest.raises(ValueError, match=f"label_good is '{good}'"):
        records(rows("label", (good, spelled, bad)), "unpaired", label_good=good)


@pytest.mark.parametrize("missing", [float("nan"), "NaN", None, ""])
def test_a_label_that_is_missing_is_not_read_as_bad(missing):
    given = rows("label", ("good", missing))
    with pytest.raises(BadRecordError, match=r"row 2: the row has no label, and .* beside"):
        records(given, "unpaired", label_good="good")


def test_the_label_of_messages_counts_too_and_a_pair_has_two():
    messages = [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "R."}]
    given = [{"messages": messages, "label": value} for value in (True, False)]
    assert [record.label for record in records(given, "unpaired")] == [True, False]
    pairs = records([{"prompt": "p", "chosen": "a", "rejected": "b"}], "unpaired")
    assert [(record.completion, record.label) for record in pairs] == [("a", True), ("b", False)]


@pytest.mark.parametrize("values", [(1, 0), ("good", "bad")])
def test_a_label_that_is_neither_true_nor_false_is_refused_with_the_setting(values):
    given = rows("label", values)
    for kind in ("demonstrations", "unpaired"):
        with pytest.raises(BadRecordError, match=r"label_good=VALUE.*label: null"):
            records(given, kind)
    assert len(records(given, "demonstrations", columns={"label": None})) == 6


def test_a_good_value_that_no_label_has_is_refused():
    with pytest.raises(BadRecordError, match="label_good='good'"):
        records(rows("label", (1, 0)), "unpaired", label_good="good")


def test_a_good_value_of_a_column_that_no_response_has_is_refused():
    for kind in ("demonstrations", "unpaired"):
        with pytest.raises(BadRecordError, match=r"label_good=5 .*'label'.*columns="):
            records(rows("rating", (5, 1)), kind, label_good=5)
    found = records(rows("rating", (5, 1)), "unpaired", label_good=5, columns={"label": "rating"})
    assert [record.label for record in found] == [True, False] * 3
    hidden = {"label_good": 5, "columns": {"label": None}}
    assert len(records(rows("rating", (5, 1)), "demonstrations", **hidden)) == 6


@pytest.mark.parametrize("values", [(True, False), ("true", "FALSE")])
def test_a_column_of_truth_values_is_named_before_demonstrations_are_learnt(values):
    given = rows("thumbs", values)
    with pytest.raises(BadRecordError, match=r"'thumbs'.*label: thumbs.*label: null"):
        records(given, "demonstrations")
    assert len(records(given, "demonstrations", columns={"label": None})) == 6
    assert len(records(given, "prompts")) == 6
    labelled = [row | {"label": True} for row in given]
    with pytest.raises(BadRecordError, match="'thumbs'"):
        records(labelled, "demonstrations")


def test_another_column_is_unread_and_a_set_without_labels_is_not_unpaired():
    given = rows("score", (1, 5))
    found = records(given, "demonstrations")
    assert [record.origin.unread for record in found] == [("score",)] * 6
    with pytest.raises(BadRecordError, match="no label"):
        records(given, "unpaired")


def test_a_label_beside_prompts_is_for_the_reward():
    found = records([{"prompt": "Q?", "label": False}, {"prompt": "P?", "label": "x"}], "prompts")
    assert all(isinstance(record, PromptRecord) and "label" in record.columns for record in found)


def test_a_row_without_its_label_is_a_bad_record():
    given = [*rows("label", (True, True)), {"prompt": "Q?", "completion": "R."}]
    for kind in ("demonstrations", "unpaired"):
        with pytest.raises(BadRecordError, match="row 7"):
            records(given, kind)
        assert len(records(given, kind, on_bad_record="skip")) == 6


def test_classes_are_refused_until_one_is_good():
    column = {"label": ClassLabel(names=["bad", "good"])}
    features = Features({"prompt": Value("string"), "completion": Value("string"), **column})
    dataset = Dataset.from_list(rows("label", [0, 1]), features=features)
    for wanted in ("demonstrations", "unpaired"):
        with pytest.raises(BadRecordError, match=r"the number 0.*label_good="):
            records(dataset, wanted)
    found = records(dataset, "unpaired", label_good=1)
    assert [record.label for record in found] == [False, True] * 3
