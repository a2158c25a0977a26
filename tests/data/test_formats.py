from __future__ import annotations

import pytest

from rlhf_lightning.data.errors import BadRecordError, Location
from rlhf_lightning.data.kinds import to_kind
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    PromptRecord,
    TextRecord,
    kind_of,
)
from tests.builders.encoding import assistant, user
from tests.builders.located_rows import source_of


def parse(*rows, columns=None, on_bad_record="raise"):
    return source_of(*rows, columns=columns, on_bad_record=on_bad_record).parsed("train")


def parse_one(row, **options):
    (parsed,) = parse(row, **options)
    return parsed


ASK = [user("why?")]
FORMATS = {
    "text": ({"text": "once"}, TextRecord("once")),
    "prompt, plain": ({"prompt": "why?"}, PromptRecord("why?")),
    "prompt, conversation": ({"prompt": ASK}, PromptRecord((user("why?"),))),
    "prompt+completion, plain": (
        {"prompt": "why?", "completion": " so"},
        DemonstrationRecord("why?", " so"),
    ),
    "prompt+completion, conversation": (
        {"prompt": ASK, "completion": [assistant("so")]},
        DemonstrationRecord((user("why?"),), (assistant("so"),)),
    ),
    "messages": (
        {"messages": [user("hi"), assistant("yes?"), user("why?"), assistant("so")]},
        DemonstrationRecord((user("hi"), assistant("yes?"), user("why?")), (assistant("so"),)),
    ),
    "preference, plain": (
        {"prompt": "why?", "chosen": " so", "rejected": " no"},
        PreferenceRecord("why?", " so", " no"),
    ),
    "preference, conversation": (
        {"prompt": ASK, "chosen": [assistant("so")], "rejected": [assistant("no")]},
        PreferenceRecord((user("why?"),), (assistant("so"),), (assistant("no"),)),
    ),
    "implied prompt, plain": (
        {"chosen": "Q: why?\nA: so", "rejected": "Q: why?\nA: no"},
        PreferenceRecord("Q: why?\nA:", " so", " no"),
    ),
    "implied prompt, conversation": (
        {"chosen": [*ASK, assistant("so")], "rejected": [*ASK, assistant("no")]},
        PreferenceRecord((user("why?"),), (assistant("so"),), (assistant("no"),)),
    ),
}


@pytest.mark.parametrize(("row", "record"), FORMATS.values(), ids=FORMATS)
def test_every_format_is_detected_and_read(row, record):
    assert parse_one(row) == record


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("A: I think so", "A: I think not", "A: I think"),
        ("the car is red", "the carpet is red", "the"),
        ("yes", "no", ""),
        ("ab", "ac", ""),
        ("Q?\n\nyes", "Q?\n\nno", "Q?"),
    ],
)
def test_a_plain_implied_prompt_ends_with_a_whole_word(chosen, rejected, prompt):
    record = parse_one({"chosen": chosen, "rejected": rejected})
    assert record.prompt == prompt
    assert record.prompt + record.chosen == chosen
    assert record.prompt + record.rejected == rejected


def test_a_plain_prompt_beside_conversations_that_contain_it_is_taken_from_them():
    sides = {"chosen": [*ASK, assistant("so")], "rejected": [*ASK, assistant("no")]}
    assert parse_one({"prompt": "why?", **sides}).prompt == (user("why?"),)


def test_domain_and_margin_are_read_and_null_counts_as_absent():
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "domain": "math", "margin": 2}
    record = parse_one(row)
    assert (record.domain, record.margin) == ("math", 2.0)
    record = parse_one({**row, "domain": None, "margin": None})
    assert (record.domain, record.margin) == ("", None)


def test_columns_map_our_names_to_theirs_and_null_hides_one():
    row = {"question": "2+2", "answer": "4", "text": "unrelated", "kind": "sum"}
    columns = {"prompt": "question", "completion": "answer", "domain": "kind"}
    assert parse_one(row, columns=columns) == DemonstrationRecord("2+2", "4", "sum")
    row = {"prompt": "x", "messages": [user("hi"), assistant("yes")]}
    assert parse_one(row, columns={"messages": None}) == PromptRecord("x")


def test_columns_with_a_name_that_is_not_ours_is_an_error_with_a_hint():
    with pytest.raises(ValueError, match="did you mean 'prompt'"):
        parse({"q": "x"}, columns={"promt": "q"})


@pytest.mark.parametrize(
    ("row", "have", "kind"),
    [
        ({"prompt": "p", "completion": "c"}, "demonstrations", "preferences"),
        ({"prompt": "p"}, "prompts", "demonstrations"),
        ({"text": "t"}, "texts", "prompts"),
        ({"prompt": "p", "completion": "c"}, "demonstrations", "texts"),
    ],
)
def test_a_kind_that_the_records_are_not_is_an_error_naming_both(row, have, kind):
    (parsed,) = parse(row)
    assert kind_of(parsed) == have
    told = rf"{kind} were asked for, but the records are {have}\. Fix: give rows with .* {have}\.$"
    with pytest.raises(BadRecordError, match=told):
        to_kind(parsed, kind)


PAIR = {"prompt": "p", "chosen": "a", "rejected": "b"}
BAD = {
    "not an object": (BadRecordError(Location("set.jsonl", 2), "it is not JSON", "x"), "not JSON"),
    "missing key": ({"prompt": "p", "chosen": "a"}, "'rejected' is missing"),
    "misspelt key": (
        {"prompt": "p", "chosen": "a", "rejcted": "b"},
        "'rejected' is missing.*did you mean 'rejcted'",
    ),
    "null": ({"prompt": "p", "chosen": "a", "rejected": None}, "'rejected' holds null"),
    "wrong type": ({**PAIR, "chosen": 3}, "'chosen' holds the number 3, expected text or a list"),
    "identical": ({**PAIR, "rejected": "a"}, "'chosen' and 'rejected' are the same: the text 'a'"),
    "nan margin": ({**PAIR, "margin": float("nan")}, "'margin' holds the number NaN"),
    "domain of a wrong type": ({**PAIR, "domain": 7}, "'domain' holds the number 7"),
    "another format": ({"text": "t"}, "mixed formats: this record reads as 'text'"),
    "another style": (
        {"prompt": [user("p")], "chosen": [assistant("a")], "rejected": [assistant("b")]},
        "mixed formats: this record is conversational, the set began plain",
    ),
    "half conversational": ({**PAIR, "chosen": [assistant("a")]}, "not both plain or both conv"),
}


@pytest.mark.parametrize(("row", "message"), BAD.values(), ids=BAD)
def test_a_bad_record_names_its_place_what_was_found_and_how_to_mend_it(row, message):
    with pytest.raises(BadRecordError, match=message) as error:
        parse(PAIR, row)
    assert str(error.value).startswith("set.jsonl, line 2: ")
    assert "Fix: " in str(error.value)
    assert isinstance(error.value, ValueError)


CALLED = [assistant("call weather"), {"role": "tool", "content": "sunny"}, assistant("it is")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [{"role": "asistant", "content": "x"}]}, "unknown role.*assistant, tool"),
        ({"prompt": [{"role": "user"}]}, r"prompt\[0\] is an object .*an object with 'role'"),
        ({"prompt": [user(None)]}, r"content of prompt\[0\] is null"),
        ({"prompt": []}, r"'prompt' holds a list \[\]"),
        ({"prompt": [user("a"), assistant("b")]}, "leaves nothing to answer"),
        ({"messages": [user("a")]}, "'messages' are from user"),
        ({"messages": "hello"}, "expected a list of messages"),
        ({"prompt": [user("a")], "completion": "b"}, "'prompt' is conversational but"),
        ({"prompt": [user("a")], "completion": CALLED}, "'completion' is from assistant, tool"),
        ({"chosen": [assistant("a")], "rejected": [assistant("b")]}, "it answers nothing"),
        ({"prompt": ""}, "'prompt' is empty"),
        ({"text": "  "}, "'text' is empty"),
        ({"text": [user("a")]}, "conversations under the key 'messages'"),
        ({"question": "a", "answer": "b"}, "{prompt: question, completion: answer}"),
        ({"promt": "a"}, "no known format.*found promt.*rename 'promt' to 'prompt'"),
        ({}, "found no keys"),
    ],
)
def test_a_first_record_that_fits_no_format_says_why(row, message):
    with pytest.raises(BadRecordError, match=message):
        parse(row)


def test_a_mapped_column_that_is_missing_is_named_with_a_hint():
    with pytest.raises(BadRecordError, match=r"'prompt' to the key 'qestion'.*mean 'question'"):
        parse({"question": "x"}, columns={"prompt": "qestion"})


def test_a_completion_missing_later_is_not_taken_for_a_prompt():
    with pytest.raises(BadRecordError, match="line 2: the key 'completion' is missing"):
        parse({"prompt": "p", "completion": "c"}, {"prompt": "p"})
