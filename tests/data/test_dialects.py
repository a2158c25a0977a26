"""Rows in dialects of files that people have: what is learnt of each, or what is named."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from rlhf_lightning.data.encode import encode_all
from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.sources.given import GivenRows
from rlhf_lightning.text.tokenizers import read_template
from tests.builders.tokenizers import build_tokenizer

ASKED, SAID = {"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "A drink."}
END, START = "<|im_end|>\n", "<|im_start|>"
PROMPT = f"{START}user\nTea?{END}{START}assistant\n"


def messages(*turns, **columns):
    return {"messages": list(turns), **columns}


def calls(call):
    return messages(ASKED, {"role": "assistant", "content": None, "tool_calls": [call]})


def alpaca(given, **columns):
    return {"instruction": "Tea?", "input": given, "output": "A drink.", **columns}


def encoded(row, template=None):
    tokenizer = build_tokenizer(template=template or read_template("thoughts_and_tools"))
    records = GivenRows([row], validation_fraction=0).records("demonstrations", "train")
    ((one,), report) = encode_all(records, tokenizer, max_length=500)
    start = int(one.loss_mask.argmax())
    given, learnt = (tokenizer.decode(ids) for ids in np.split(one.input_ids, [start]))
    return given, learnt.removesuffix("<|im_end|>"), report


@pytest.mark.parametrize(
    ("user", "assistant", "keys"),
    [
        ("USER", "Assistant", ("role", "content")),
        ("human", "gpt", ("from", "value")),
        ("Human", "ai", ("from", "value")),
        ("prompter", "model", ("role", "content")),
        ("User", "bot", ("role", "content")),
    ],
)
def test_a_role_of_another_tool_is_the_role_that_it_means(user, assistant, keys):
    turns = [dict(zip(keys, turn, strict=True)) for turn in ((user, "Tea?"), (assistant, "Yes."))]
    assert encoded({"messages": turns})[:2] == (PROMPT, "Yes.")


def test_the_developers_message_is_given_to_the_template():
    row = messages({"role": "developer", "content": "Be brief."}, ASKED, SAID)
    assert encoded(row)[0] == f"{START}developer\nBe brief.{END}{PROMPT}"
    (record,) = GivenRows([row], validation_fraction=0, system_into_user=True).records(
        "demonstrations", "train"
    )
    assert record.prompt == ({"role": "user", "content": "Be brief.\n\nTea?"},)


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", None])
def test_parts_of_text_are_text_whatever_they_are_called(kind):
    parts = [{"type": kind, "text": "A "}, {"type": kind, "text": "drink."}]
    assert encoded(messages(ASKED, SAID | {"content": parts}))[1] == "A drink."


@pytest.mark.parametrize("given", ["\n", "<noinput>", None, pd.NA])
def test_an_input_that_says_nothing_is_no_part_of_an_alpaca_prompt(given):
    assert encoded(alpaca(given))[0] == "Tea?"


@pytest.mark.parametrize(("outer", "key"), [(True, "parameters"), (False, "args")])
def test_arguments_under_another_key_are_named(outer, key):
    call = {"name": "f", key: {"town": "Ulm"}}
    with pytest.raises(BadRecordError, match=r"messages\[1\].*'f|\"f"):
        encoded(calls({"function": call} if outer else call))
    assert '"arguments": {}' in encoded(calls({"id": "c1", "function": {"name": "f"}}))[1]


def test_a_thought_that_a_message_has_twice_is_named():
    twice = SAID | {"content": "<think>hot</think>A drink.", "reasoning_content": "hot"}
    with pytest.raises(BadRecordError, match=r"messages\[1\] .*reasoning_content.*<think>"):
        encoded(messages(ASKED, twice))


@pytest.mark.parametrize(
    ("value", "is_named"),
    [
        (np.arange(3), True),
        (np.array([]), False),
        (pd.Timestamp("2024-07-26"), True),
        (pd.NA, False),
        (pd.NaT, False),
        (float("nan"), False),
        ([], False),
        ("[]", False),
        (0, True),
    ],
)
def test_a_column_of_any_type_is_named_as_unread_where_it_says_something(value, is_named):
    report = encoded(messages(ASKED, SAID, vector=value))[2]
    assert list(report.unread_columns) == ["vector"] * is_named


@pytest.mark.parametrize("column", ["system", "tools", "history", "chat_template_kwargs"])
@pytest.mark.parametrize("missing", [pd.NA, None])
def test_a_missing_value_of_pandas_is_none(column, missing):
    given, learnt, report = encoded(messages(ASKED, SAID, **{column: missing}))
    assert (given, learnt, dict(report.unread_columns)) == (PROMPT, "A drink.", {})


NAMES_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [NAMES_CALLS, read_template("thoughts_and_tools")])
def test_a_key_of_a_message_that_the_template_reads_elsewhere_alone_is_named(template):
    row = messages(ASKED | {"name": "Ann", "tools": ["f"]}, SAID)
    given, _, report = encoded(row, template)
    assert ("name" in report.unread) == ("Ann" not in given) == (template == NAMES_CALLS)
    assert "tools" in report.unread


@pytest.mark.parametrize(
    "other", [{"image_url": {"url": "x"}}, {"data": "x"}, {"annotations": [1]}]
)
def test_a_part_of_text_that_holds_more_is_named(other):
    part = {"type": "text", "text": "Tea?"}
    with pytest.raises(BadRecordError, match=r"messages\[0\] has the part"):
        encoded(messages(ASKED | {"content": [part | other]}, SAID))
    empty = dict.fromkeys(other)
    assert encoded(messages(ASKED | {"content": [part | empty]}, SAID))[0] == PROMPT


@pytest.mark.parametrize("key", ["conversations", "conversation"])
def test_messages_are_read_before_the_keys_of_public_sets(key):
    others = [{"from": "human", "value": "Milk?"}, {"from": "gpt", "value": "White."}]
    others = [{"input": "Milk?", "output": "White."}] if key == "conversation" else others
    given, learnt, report = encoded(messages(ASKED, SAID, **{key: others}))
    assert (given, learnt, list(report.unread_columns)) == (PROMPT, "A drink.", [key])


def test_keys_of_two_dialects_in_a_message_are_named():
    turn = ASKED | {"from": "human", "value": "Milk?"}
    given, _, report = encoded(messages(turn, SAID))
    assert (given, set(report.unread)) == (PROMPT, {"from", "value"})


def test_a_call_without_a_name_is_named():
    with pytest.raises(BadRecordError, match=r"a call of messages\[1\]"):
        encoded(calls({"function": {"name": " ", "arguments": {"a": 1}}}))


@pytest.mark.parametrize("column", ["label", "score"])
def test_a_verdict_beside_a_pair_is_named_as_unread(column):
    rows = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b", column: i} for i in range(2)]
    records = GivenRows(rows, validation_fraction=0).records("preferences", "train")
    _, report = encode_all(records, build_tokenizer(), max_length=100)
    assert report.unread_columns == {column: 2}


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_one_side_of_all_pairs_that_repeats_the_prompt_is_a_warning(side, caplog):
    rows = [{"prompt": f"Tea {i}?", "chosen": "Yes.", "rejected": "No."} for i in range(3)]
    rows = [row | {side: f"{row['prompt']} {row[side]}"} for row in rows]
    GivenRows(rows, validation_fraction=0).records("preferences", "train")
    assert ["begin with their prompt" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("turns", "answer", "warned"),
    [
        ([{"role": "system", "content": "Be brief."}, ASKED], "Tea? A drink.", True),
        ([ASKED, SAID, {"role": "user", "content": "Yes"}], "Yes, it is hot.", False),
        ([ASKED, SAID, {"role": "tool", "content": '["5 degrees"]'}], '["5 degrees"] it is', False),
    ],
    ids=["its prompt", "a short turn", "the result of a tool"],
)
def test_an_answer_that_quotes_a_later_turn_does_not_repeat_its_prompt(
    turns, answer, warned, caplog
):
    rows = [messages(*turns, {"role": "assistant", "content": f"{answer} {i}"}) for i in range(3)]
    GivenRows(rows, validation_fraction=0).records("demonstrations", "train")
    assert ["begin with their prompt" in record.message for record in caplog.records] == [
        True
    ] * warned


@pytest.mark.parametrize(
    "more", [{"role": "user"}, {"role": None}, {"role": None, "content": None}]
)
@pytest.mark.parametrize("last", [True, False])
def test_a_message_whose_own_keys_are_not_filled_is_read_by_the_others(more, last):
    theirs = {"from": "human", "value": ASKED["content"]}
    given, learnt, report = encoded(messages(theirs | more if last else more | theirs, SAID))
    assert (given, learnt, dict(report.unread)) == (PROMPT, "A drink.", {})


def test_an_empty_key_of_a_call_holds_no_arguments():
    for given in ({"arguments": {"town": "Ulm"}}, {}):
        call = {"name": "f", "parameters": {}} | given
        assert encoded(calls(call))
        assert encoded(calls({"function": call}))
