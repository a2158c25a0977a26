"""Rows whose other columns say that a response is good or bad."""

from __future__ import annotations

import json
import logging
import re
from itertools import cycle
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.labels import verdict
from rlhf_lightning.data.records import DemonstrationRecord, PromptRecord, UnpairedRecord
from rlhf_lightning.data.sources.base import FileSource
from rlhf_lightning.data.sources.given import GivenRows

PAIRS = [("👍", "👎"), ("thumbs up", "thumbs-down"), (True, False), (1.0, -1.0), ("TRUE", "FALSE")]
PAIRS += [("1", "0"), ([True], [False])]


def rows(name: str, values: Any, *, same: int = 1) -> list[dict[str, Any]]:
    """Return rows of which `same` in turn have one prompt."""
    return [
        {"prompt": f"Question {i // same}?", "completion": f"Response {i}.", name: value}
        for i, value in enumerate(list(values) * 3)
    ]


def records(given: Any, kind: Any, **options: Any) -> list[Any]:
    return GivenRows(given, validation_fraction=0.0, **options).records(kind, "train")


def completions(found: list[Any]) -> list[Any]:
    return [record.completion for record in found]


@pytest.mark.parametrize(
    ("name", "values"), zip(cycle(("label", "kto_tag", "userFeedback")), PAIRS, strict=False)
)
def test_a_response_that_is_labelled_bad_is_no_demonstration(name, values):
    given = rows(name, values)
    with pytest.raises(
        BadRecordError, match=rf"row 2: the label '{name}'.*on_bad_record=skip.*kto"
    ):
        records(given, "demonstrations")
    good = records(given, "demonstrations", on_bad_record="skip")
    assert completions(good) == ["Response 0.", "Response 2.", "Response 4."]
    assert all(type(record) is DemonstrationRecord for record in good)
    every = records(given, "demonstrations", columns={"label": None})
    assert len(every) == 6
    unpaired = records(given, "unpaired")
    assert [record.label for record in unpaired] == [True, False] * 3
    assert all(type(record) is UnpairedRecord for record in unpaired)


def test_the_label_of_messages_and_of_a_column_that_is_mapped_counts_too():
    messages = [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "R."}]
    given = [{"messages": messages, "helps": value} for value in ("yes", "no")]
    with pytest.raises(BadRecordError, match="'helps'"):
        records(given, "demonstrations", columns={"label": "helps"})
    found = records(given, "unpaired", columns={"label": "helps"})
    assert [record.label for record in found] == [True, False]


@pytest.mark.parametrize(
    ("name", "values"),
    [("score", ("1", "4.5")), ("rating", (0.25, 0.75)), ("helpfulness", (-2, 3))],
)
def test_rated_responses_to_one_prompt_are_no_demonstrations_until_it_is_said(name, values):
    given = rows(name, values, same=2)
    for on_bad_record in ("raise", "skip"):
        with pytest.raises(BadRecordError, match=f"{name}' rates.*label: null"):
            records(given, "demonstrations", on_bad_record=on_bad_record)
    assert len(records(given, "demonstrations", columns={"label": None})) == 6
    with pytest.raises(BadRecordError, match="no label"):
        records(given, "unpaired")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("label", ("home", "leisure")),
        ("label", (True, True)),
        ("score", (4, 4)),
        ("label", (None, None)),
        ("year", (2024, 2025)),
        ("source", ("web", "book")),
    ],
)
def test_a_topic_a_count_and_a_label_that_is_always_good_say_nothing(name, values, caplog):
    with caplog.at_level(logging.WARNING):
        found = records(rows(name, values), "demonstrations")
    assert len(found) == 3 * len(values)
    assert not caplog.records


def test_a_set_in_which_every_response_is_bad_is_refused():
    with pytest.raises(BadRecordError, match="row 1: the label"):
        records(rows("label", (False, False)), "demonstrations")


@pytest.mark.parametrize(
    ("name", "values"),
    [("score", ("high", "low")), ("grade", ("A", "B", "F")), ("stars", ("5 stars", "1 star"))],
)
def test_grades_in_words_are_ratings(name, values):
    with pytest.raises(BadRecordError, match="rates"):
        records(rows(name, values, same=2), "demonstrations")


@pytest.mark.parametrize("values", [(1, 5), (0.25, 0.75), ("high", "low")])
def test_a_rating_of_the_only_response_to_each_prompt_is_named(values, caplog):
    with caplog.at_level(logging.WARNING):
        assert len(records(rows("score", values), "demonstrations")) == 6
    assert "'score'" in caplog.text
    caplog.clear()
    good = [row | {"label": True} for row in rows("score", values, same=2)]
    assert len(records(good, "demonstrations")) == 6
    assert [record.label for record in records(good, "unpaired")] == [True] * 6
    assert not caplog.records


def test_a_third_word_beside_good_and_bad_is_neither():
    given = rows("label", ("good", "neutral", "bad"))
    with pytest.raises(BadRecordError, match=r"row 2: .*neither good nor bad"):
        records(given, "demonstrations")
    assert len(records(given, "demonstrations", on_bad_record="skip")) == 3
    assert len(records(given, "unpaired", on_bad_record="skip")) == 6


def test_remarks_on_responses_are_no_ratings(caplog):
    given = rows("feedback", [f"It is {i} words too long for a good response." for i in range(9)])
    assert len(records(given, "demonstrations")) == 27
    assert not caplog.records


def test_words_that_may_be_opposites_are_named(caplog):
    with caplog.at_level(logging.WARNING):
        assert len(records(rows("label", ("safe", "unsafe")), "demonstrations")) == 6
    assert "column label of true and false" in caplog.text


@pytest.mark.parametrize(
    ("name", "values"), [("is_english", (True, False)), ("sentiment", ("positive", "negative"))]
)
def test_a_column_that_may_be_a_label_is_named_and_its_rows_are_read(name, values, caplog):
    with caplog.at_level(logging.WARNING):
        found = records(rows(name, values), "demonstrations")
    assert len(found) == 3 * len(values)
    (record,) = caplog.records
    assert f"columns={{label: {name}}}" in record.getMessage()


def test_a_label_beside_prompts_is_for_the_reward():
    found = records([{"prompt": "Q?", "label": False}, {"prompt": "P?", "label": True}], "prompts")
    assert all(isinstance(record, PromptRecord) and "label" in record.columns for record in found)
    assert len(records(rows("label", (True, False)), "prompts")) == 6


def test_a_row_without_its_label_is_a_bad_record():
    given = [*rows("label", (True, False)), {"prompt": "Q?", "completion": "R."}]
    for kind in ("demonstrations", "unpaired"):
        with pytest.raises(BadRecordError, match=r"row (7|2)"):
            records(given, kind)
    assert len(records(given, "unpaired", on_bad_record="skip")) == 6


@pytest.mark.parametrize("word", ["home", "2", "none", "", "0.5", "positively"])
def test_words_that_are_no_verdict_are_none(word):
    assert verdict(word) is None


@pytest.mark.parametrize("repeats", [True, False])
def test_responses_that_all_begin_with_their_prompt_are_named(repeats, caplog):
    def answer(i: int) -> str:
        return f"Question {i}?\n Yes." if repeats or i else "Yes."

    plain = [{"prompt": f"Question  {i}?", "completion": answer(i)} for i in range(4)]
    pairs = [
        {"prompt": f"Question {i}?", "chosen": answer(i), "rejected": answer(i) + " No."}
        for i in range(4)
    ]
    chat = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
        }
        for row in plain
    ]
    with caplog.at_level(logging.WARNING):
        for given, kind in ((plain, "demonstrations"), (pairs, "preferences"), (chat, "prompts")):
            records(given, kind)
    assert len(caplog.records) == (3 if repeats else 0)


BAD_NAMES = ["thumbsDown", "not_helpful", "isDisliked", "toxic", "is_toxic", "flagged", "unsafe"]
BAD_NAMES += ["has_error", "hallucination", "hallucinated", "refused", "refusal", "deleted", "spam"]
BAD_NAMES += ["irrelevant_or_spam", "invalid"]


@pytest.mark.parametrize("values", [(1, 0), ("yes", "no")])
@pytest.mark.parametrize("name", BAD_NAMES)
def test_true_is_bad_where_the_name_of_the_column_says_so(name, values, caplog):
    given = rows(name, values)
    found = records(given, "unpaired", columns={"label": name})
    assert [record.label for record in found] == [False, True] * 3
    options = {"columns": {"label": name}, "on_bad_record": "skip"}
    good = records(given, "demonstrations", **options)
    assert completions(good) == ["Response 1.", "Response 3.", "Response 5."]
    if name in ("thumbsDown", "not_helpful"):  # the others have to be mapped
        assert records(given, "unpaired") == found
    else:
        caplog.clear()
        assert len(records(given, "demonstrations")) == 6
        assert f"are bad, set columns={{label: {name}}}" in caplog.text


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("not_bad", (True, False)),
        ("thumbs_up", (1, 0)),
        ("thumbs_down", ("good", "bad")),
        *((name, (True, False)) for name in ("no_errors", "spam_free", "errorless_ok", "is_safe")),
    ],
)
def test_true_is_good_under_another_name_and_words_speak_for_themselves(name, values, caplog):
    found = records(rows(name, values), "unpaired", columns={"label": name})
    assert [record.label for record in found] == [True, False] * 3
    assert not caplog.records


@pytest.mark.parametrize(("name", "values"), [("vulgar", (1, 0)), ("helps", ("yes", "no"))])
def test_a_name_that_does_not_say_whether_true_is_good_is_told_how_it_is_read(name, values, caplog):
    found = records(rows(name, values), "unpaired", columns={"label": name})
    assert [record.label for record in found] == [True, False] * 3
    assert [f"'{name}' is read with true as good" in one.getMessage() for one in caplog.records]


@pytest.mark.parametrize(
    ("values", "columns", "named"),
    [
        *(((x, y), {}, True) for x, y in ("+-", "✓✗", "AF", ("gut", "schlecht"), ("ham", "spam"))),
        (({"value": True}, {"value": False}), {}, True),
        (("approved", "denied"), {}, True),
        (("good", "good"), {}, False),
        ((True, True), {"label": "label"}, False),
    ],
)
def test_a_label_that_is_not_understood_is_an_unread_column(values, columns, named):
    found = records(rows("label", values), "demonstrations", columns=columns)
    assert [record.origin.unread for record in found] == [("label",) * named] * 6


@pytest.mark.parametrize(
    ("wrap", "named"),
    [
        (lambda text: str([text]), "prompt completion chosen rejected"),
        (lambda text: str(text.encode()), "prompt completion chosen rejected"),
        (json.dumps, "prompt completion chosen rejected"),
        (lambda text: str([text, "b"]), "prompt completion chosen rejected"),
        (lambda text: json.dumps([text, "b"]), "prompt"),  # a task may ask for a list
        (lambda text: f"[{text}]", ""),
        (lambda text: f'"{text}" she said', ""),
    ],
)
def test_texts_that_are_all_prints_of_texts_are_named(wrap, named, caplog):
    def row(*keys):
        return [{key: wrap(f"{key} {i}") for key in ("prompt", *keys)} for i in range(2)]

    with caplog.at_level(logging.WARNING):
        records(row("completion"), "demonstrations")
        records(row("chosen", "rejected"), "preferences")
    said = [record.getMessage() for record in caplog.records]
    keys = [line.split("all texts of ")[1].split()[0] for line in said]
    assert set(keys) == set(named.split())
    caplog.clear()
    records([*row("completion"), {"prompt": "p", "completion": "a"}], "demonstrations")
    assert not caplog.records


@pytest.mark.parametrize(
    "name",
    [
        "thumbsUpOrDown",
        "accepted_or_rejected",
        "good_vs_bad",
        "n_correct",
        "label_no",
        "no_think_score",
        "non_english_label",
    ],
)
def test_a_name_of_both_poles_or_of_a_number_says_that_true_is_good(name, caplog):
    found = records(rows(name, (True, False)), "unpaired", columns={"label": name})
    assert [record.label for record in found] == [True, False] * 3
    assert not caplog.records


@pytest.mark.parametrize("odd", [float("nan"), "", "skip"])
@pytest.mark.parametrize("values", [(True, False), (1, 0)])
@pytest.mark.parametrize("mapped", [True, False])
def test_an_odd_cell_leaves_a_name_of_bad_its_meaning(odd, values, mapped, caplog):
    options = {"columns": {"label": "thumbs_down"}} if mapped else {}
    given = rows("thumbs_down", (*values, odd))
    found = records(given, "unpaired", on_bad_record="skip", **options)
    assert [record.label for record in found] == [False, True] * 3
    said = [r for r in caplog.records if "true is bad" in r.getMessage()]
    assert len(said) == 1
    assert "'thumbs_down'" in said[0].getMessage()


def classes(names, values):
    column = {"label": ClassLabel(names=names)}
    features = Features({"prompt": Value("string"), "completion": Value("string"), **column})
    return Dataset.from_list(rows("label", values), features=features)


def stored(kind, dataset, folder):
    if kind == "memory":
        return GivenRows(dataset, validation_fraction=0.0)
    if kind == "parquet":
        dataset.to_parquet(str(folder / "rows.parquet"))
        return FileSource(folder / "rows.parquet", validation_fraction=0.0)
    dataset.save_to_disk(str(folder / "saved"))
    (file,) = (folder / "saved").glob("*.arrow")
    return FileSource(file, validation_fraction=0.0, on_bad_record="skip")


@pytest.mark.parametrize("kind", ["memory", "parquet", "arrow"])
@pytest.mark.parametrize("names", [("good", "bad"), ("bad", "good"), ("a", "b", "c")])
def test_classes_with_names_of_their_own_are_refused_with_the_line_that_says_which_is_good(
    kind, names, tmp_path
):
    dataset = classes(list(names), [0, 1])
    source = stored(kind, dataset, tmp_path)
    for wanted in ("demonstrations", "unpaired"):
        with pytest.raises(BadRecordError, match=f"0 for '{names[0]}' and 1 for") as caught:
            source.records(wanted, "train")
    line = re.search(r"Dataset\.from_list\(.*?dataset\]\)", str(caught.value))[0]
    good = eval(line.replace("N", "1"), {"Dataset": Dataset, "dataset": dataset})
    found = GivenRows(good, validation_fraction=0.0).records("unpaired", "train")
    assert [record.label for record in found] == [False, True] * 3


@pytest.mark.parametrize("names", [("0", "1"), ("False", "True")])
def test_classes_that_are_named_as_truth_values_are_read(names, tmp_path):
    for kind in ("memory", "parquet"):
        found = stored(kind, classes(list(names), [1, 0]), tmp_path).records("unpaired", "train")
        assert [record.label for record in found] == [True, False] * 3
