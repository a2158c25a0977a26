"""Every key of a row and of its messages is used, refused, or named as unread; cells are JSON."""

import csv
import json

import numpy as np
import pandas as pd
import pytest

from rlhf_lightning.data.errors import BadRecordError, Location
from rlhf_lightning.data.formats import RowParser
from rlhf_lightning.data.sources.base import FileSource
from rlhf_lightning.data.sources.given import GivenRows
from rlhf_lightning.data.summary import summarize
from tests.builders.encoding import assistant, encode_all, user
from tests.builders.record_files import source_of
from tests.builders.tokenizers import build_tokenizer


def read(rows, kind):
    return GivenRows(rows, validation_fraction=0.0).records(kind, "train")


ASK = user("weather?")
CALL = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"town": "Ulm"}}}
WRITES_ALL = (
    "{%- for d in documents or [] %}{{ d | tojson }}{% endfor %}"
    "{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{%- for m in messages %}<{{ m.role }} {{ m.name }} {{ m.tool_call_id }}>"
    "{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "<|im_end|>{% endfor %}"
    "{%- if add_generation_prompt %}<assistant  >{% if not thinking %}{% endif %}{% endif %}"
)


def parse(row, **columns):
    return RowParser(columns or None)(row, Location("f.jsonl", 1))


def conversation(*more, **answer):
    return {"messages": [ASK, *more, {**assistant("sunny"), **answer}]}


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        json.dumps([CALL]),
        [{**CALL, "function": {"name": "f", "arguments": '{"town": "Ulm"}'}}],
        [{"id": "c1", "name": "f", "arguments": {"town": "Ulm"}}],
        [{**CALL, "index": None, "function": {**CALL["function"], "strict": None}}],
    ],
)
def test_calls_have_one_form(calls):
    record = parse({"messages": [ASK, {"role": "assistant", "tool_calls": calls}]})
    assert record.completion == ({"role": "assistant", "content": "", "tool_calls": [CALL]},)


def calls_of_two_functions():
    """Two rows whose calls and tools have different keys; nulls of the first one are written."""
    first = {"town": "Ulm", "unit": None, "parts": [{"a": None}]}
    schemas = {"properties": {"unit": {"default": None}}}, {"properties": {"day": {"type": "int"}}}
    for name, arguments, schema in (("f", first, schemas[0]), ("g", {"day": 1}, schemas[1])):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        yield {"messages": [ASK, turn], "tools": [{"name": name, "parameters": schema}]}


WRITTEN = [".jsonl", ".json", "dataset.json"]


def arguments_and_tools(source):
    records = source.records("demonstrations", "train")
    calls = [record.completion[0]["tool_calls"][0]["function"] for record in records]
    return [call["arguments"] for call in calls], [r.variables["tools"][0] for r in records]


@pytest.mark.parametrize("spell", [lambda x: x, json.dumps])
@pytest.mark.parametrize("way", [*WRITTEN, ".json.parquet"])
def test_nulls_that_are_written_are_kept(tmp_path, way, spell):
    rows = list(calls_of_two_functions())
    said = [row["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in rows]
    tools = [row["tools"][0] for row in rows]
    for row in rows:
        row["tools"] = spell(row["tools"])
    assert arguments_and_tools(source_of(rows, tmp_path, way)) == (said, tools)


@pytest.mark.parametrize("way", [".parquet", "dataset"])
def test_nulls_that_fill_the_objects_of_a_table_are_taken_out(tmp_path, way):
    said, tools = arguments_and_tools(source_of(list(calls_of_two_functions()), tmp_path, way))
    assert said == [{"town": "Ulm", "parts": [{}]}, {"day": 1}]
    schemas = {"properties": {"unit": {}}}, {"properties": {"day": {"type": "int"}}}
    assert tools == [{"name": n, "parameters": s} for n, s in zip("fg", schemas, strict=True)]


def test_nulls_in_memory_are_refused_unless_they_are_json(tmp_path):
    rows = list(calls_of_two_functions())
    for column in ("messages", "tools"):
        with pytest.raises(BadRecordError, match=f"row 1: {column!r} has a null.*JSON of"):
            arguments_and_tools(source_of(rows, tmp_path, "memory"))
        rows = [row | {column: json.dumps(row[column])} for row in rows]
    expected = arguments_and_tools(source_of(rows, tmp_path, ".jsonl"))
    assert arguments_and_tools(source_of(rows, tmp_path, "memory")) == expected


@pytest.mark.parametrize("way", WRITTEN)
def test_nulls_of_the_one_tool_of_all_rows_are_kept(tmp_path, way):
    rows = [row for row in calls_of_two_functions() if row["tools"][0]["name"] == "f"] * 3
    said, tools = arguments_and_tools(source_of(rows, tmp_path, way))
    assert said == [{"town": "Ulm", "unit": None, "parts": [{"a": None}]}] * 3
    assert tools == [{"name": "f", "parameters": {"properties": {"unit": {"default": None}}}}] * 3


def test_nulls_of_messages_are_none():
    nulls = dict.fromkeys(["name", "tool_calls", "reasoning_content", "weight", "function_call"])
    assert parse(conversation(**nulls)) == parse(conversation())


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "sun", "image": None}, "ny"]
    assert parse(conversation(content=parts)) == parse(conversation())
    with pytest.raises(BadRecordError, match=r"messages\[1\] has the part"):
        parse(conversation(content=[{"type": "image_url", "image_url": {"url": "x"}}]))


@pytest.mark.parametrize(
    "said", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False}]
)
def test_an_answer_that_is_not_to_be_learnt_is_no_demonstration(said):
    with pytest.raises(BadRecordError, match="weight 0"):
        parse(conversation(**said))
    row = {"prompt": [ASK], "chosen": [{**assistant("a"), **said}], "rejected": [assistant("b")]}
    with pytest.raises(BadRecordError, match="'chosen' has weight 0"):
        parse(row)
    earlier = parse(conversation({**assistant("?"), **said}, user("and?"))).prompt
    assert earlier[1]["weight"] == 0
    record = parse(conversation(assistant("?"), user("and?"), **said))
    assert (record.prompt, record.completion) == ((ASK,), (assistant("?"),))


def test_a_system_column_is_the_system_message():
    system = {"role": "system", "content": "rhyme"}
    assert parse(conversation() | {"system": "rhyme"}).prompt == (system, ASK)
    row = {"messages": [system, ASK, assistant("sunny")], "system": "rhyme"}
    assert parse(row).prompt == (system, ASK)
    with pytest.raises(BadRecordError, match="'system'"):
        parse(row | {"system": "do not rhyme"})


def test_what_is_unread_is_counted_on_the_first_screen():
    tokenizer = build_tokenizer(template=WRITES_ALL)
    row = conversation(mood="good") | {"extra": 1, "chat_template_kwargs": {"thinkin": True}}
    records = read([row], "demonstrations")
    encoded, report = encode_all(records, tokenizer, max_length=300)
    assert (dict(report.unread), dict(report.unread_columns)) == (
        {"mood": 1, "thinkin": 1},
        {"extra": 1},
    )
    screen = summarize(encoded, name="train", report=report).render()
    assert all(name in screen for name in ("mood", "thinkin", "extra"))


def test_columns_of_prompts_are_quiet_and_go_to_rewards():
    rows = [{"prompt": [ASK], "extra": 1, "documents": [{"text": "x"}]}]
    (record,) = read(rows, "prompts")
    assert record.columns == {"extra": 1, "documents": [{"text": "x"}]}
    assert record.variables == {"documents": [{"text": "x"}]}
    tokenizer = build_tokenizer(template=WRITES_ALL)
    assert not encode_all([record], tokenizer, max_length=300)[1].unread_columns


def test_what_rows_say_is_in_the_tokens():
    tokenizer = build_tokenizer(template=WRITES_ALL)
    result = {"role": "tool", "name": "f", "tool_call_id": "c9", "content": "12"}
    row = conversation({**assistant("hm"), "tool_calls": [CALL]}, result, thinking="because")
    row |= {"tools": [{"name": "f"}], "documents": [{"text": "PAGE"}]}
    records = read([row], "demonstrations")
    ((sequence,), _) = encode_all(records, tokenizer, max_length=900)
    text = tokenizer.decode(sequence.input_ids)
    assert all(said in text for said in ("because", "Ulm", "c9", "PAGE", '"name": "f"'))
    assert "because" in tokenizer.decode(sequence.input_ids[sequence.loss_mask])


def test_prompts_that_differ_in_documents_are_two():
    rows = [conversation() | {"documents": [{"text": text}]} for text in "ab"]
    assert len(read(rows, "prompts")) == 2


@pytest.mark.parametrize(
    "said",
    [
        {"completion": [assistant("a")], "label": True},
        {"chosen": [assistant("a")], "rejected": [assistant("b")]},
    ],
)
def test_unpaired_rows_keep_the_variables_of_the_template(said):
    tools = [{"type": "function", "function": {"name": "f"}}]
    records = read([{"prompt": [ASK], "tools": tools, **said}], "unpaired")
    assert all(record.variables["tools"] == tools for record in records)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_is_kept_under_one_key(key):
    completion = parse(conversation(**{key: "look up"})).completion
    assert completion == ({**assistant("sunny"), "reasoning_content": "look up"},)
    with pytest.raises(BadRecordError, match=r"messages\[1\] .*reasoning_content.*<think>"):
        parse(conversation(content="<think>hot</think>sunny", **{key: "look up"}))


@pytest.mark.parametrize("said", ['{"name": "f", "arguments": {"town": "Ulm"}}', "f(Ulm)", "[]"])
def test_turns_of_sharegpt_that_say_calls_are_calls_or_refused(said):
    turns = [("human", "weather?"), ("function_call", said), ("observation", "12"), ("gpt", "warm")]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns]}
    if not said.startswith("{"):
        with pytest.raises(BadRecordError, match=r"messages\[1\]"):
            read([row], "demonstrations")
        return
    call = {key: CALL[key] for key in ("type", "function")}
    (record,) = read([row], "demonstrations")
    assert record.prompt[1] == {**assistant(""), "tool_calls": [call]}
    assert record.prompt[2] == {"role": "tool", "content": "12"}


@pytest.mark.parametrize(
    ("who", "keys"),
    [(("USER", "Assistant"), ("role", "content")), (("Human", "model"), ("from", "value"))],
)
def test_a_role_of_another_tool_is_the_role_that_it_means(who, keys):
    turns = [dict(zip(keys, turn, strict=True)) for turn in zip(who, ("a?", "b"), strict=True)]
    nulls = [turn | {"role": None} if "from" in turn else turn for turn in turns]
    for given in (turns, nulls):
        record = parse({"messages": given})
        assert (record.prompt, record.completion) == ((user("a?"),), (assistant("b"),))
    both = user("a?") | {"from": "human", "value": "c?"}
    assert parse({"messages": [both, assistant("b")]}).prompt == (both,)


def test_the_developers_message_is_given_to_the_template_or_to_the_user():
    row = {"messages": [{"role": "developer", "content": "Be brief."}, ASK, assistant("sunny")]}
    assert [m["role"] for m in parse(row).prompt] == ["developer", "user"]
    source = GivenRows([row], validation_fraction=0, system_into_user=True)
    (record,) = source.records("demonstrations", "train")
    assert record.prompt == (user("Be brief.\n\nweather?"),)


@pytest.mark.parametrize("spell", [lambda x: x, json.dumps])
def test_variables_of_the_template_come_from_columns(spell):
    tools, documents = [{"name": "f", "default": None}], [{"title": "T", "text": "x"}]
    row = conversation() | {"tools": spell(tools), "documents": spell(documents)}
    row["chat_template_kwargs"] = spell({"thinking": False, "other": None})
    record = parse(row)
    assert record.variables == {"tools": tools, "documents": documents, "thinking": False}
    assert parse(row, tools=None, documents=None).variables == {"thinking": False}


@pytest.mark.parametrize(
    ("row", "columns", "unread"),
    [
        ({"prompt": "p", "completion": "c", "system": "s", "label": "x"}, {}, ("system", "label")),
        ({"instruction": "p", "output": "c", "input": "PASSAGE"}, {}, ()),
        (
            {"instruction": "p", "output": "c", "input": "PASSAGE", "id": ""},
            {"prompt": "instruction", "completion": "output"},
            ("input",),
        ),
        ({"prompt": "p", "prompt_id": 1, **conversation()}, {}, ("prompt", "prompt_id")),
        (conversation() | {"tools": ["f"], "documents": None}, {}, ("tools",)),
        (conversation() | {"vector": np.arange(3), "tools": pd.NA}, {}, ("vector",)),
    ],
)
def test_columns_that_no_record_has_are_unread(row, columns, unread):
    assert parse(row, **columns).origin.unread == unread


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "w1", "extra": 1, "system": "x", "tools": [{"name": "f"}]}, "system tools"),
        ({"prompt": [ASK], "system": "x", "tools": ["f"]}, "tools"),
        ({"text": "w1", "system": "x", "extra": 1}, "system"),
    ],
)
def test_a_part_of_a_conversation_beside_prompts_and_texts_is_named(row, named):
    tokenizer = build_tokenizer(template=WRITES_ALL)
    records = read([row], "texts" if "text" in row else "prompts")
    report = encode_all(records, tokenizer, max_length=300)[1]
    assert sorted(report.unread_columns) == named.split()


# -- cells of text -----------------------------------------------------------------------------

WHOLE = [ASK, assistant('"sunny", it\'s [so]\n')]


def test_a_table_of_conversations_in_json_is_the_same_set_as_its_lists(tmp_path):
    rows = [
        {"prompt": [user(f"{i}?")], "chosen": WHOLE[1:], "rejected": [assistant("no")]}
        for i in range(4)
    ]
    path = tmp_path / "pairs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({key: json.dumps(value) for key, value in row.items()} for row in rows)
    found = FileSource(path, validation_fraction=0.0).records("preferences", "train")
    assert found == read(rows, "preferences")
    arrays = [{key: np.array(value) for key, value in row.items()} for row in rows]
    assert read(arrays, "preferences") == found


def calling(calls):
    return {"messages": [ASK, {**assistant(""), "tool_calls": calls}]}


CALLS_ITSELF = {**assistant("x"), "function_call": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (conversation(reasoning_content="a", thinking="b"), "reasoning_content and thinking"),
        (conversation(CALLS_ITSELF, user("and?")), r"function_call.*tool_calls"),
        (conversation(weight=0.5), "weight"),
        (conversation(weight=1, train=0), "weight"),
        (conversation(train="some"), "weight"),
        (
            conversation() | {"chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs .*tokenize",
        ),
        (conversation() | {"history": [["hi", "ho"]]}, r"'history'.*columns={history: null}"),
        (calling("f()"), r"messages\[1\]"),
        (calling([{"name": "f", "arguments": "Ulm"}]), r"messages\[1\]"),
        (calling(repr([CALL])), r"messages\[1\]"),
        ({"messages": repr(WHOLE)}, r"'messages'.*json\.dumps"),
        ({"messages": json.dumps(WHOLE)[:-9]}, r"'messages'.*json\.dumps"),
    ],
)
def test_what_no_conversation_can_say_is_refused_by_its_key(row, named):
    with pytest.raises(BadRecordError, match=named):
        parse(row)


@pytest.mark.parametrize(
    "text",
    ['{"name": "Ann"}', '["a", "b"]', '{"role": "admin"}', "{{ user }}", "[INST] hi [/INST]",
     "null", "The role: user", "array of roles", '"role": "x"'],
)  # fmt: skip
def test_any_other_text_stays_as_it_is(text):
    assert parse({"prompt": "p", "completion": text}).completion == text


def test_json_that_a_prompt_asked_for_stays_text_and_a_cell_beside_a_plain_prompt_is_named():
    dialogue, one = json.dumps(WHOLE), json.dumps(WHOLE[1:])
    assert parse({"prompt": "As JSON.", "completion": dialogue}).completion == dialogue
    with pytest.raises(BadRecordError, match="'prompt' is plain but 'completion'"):
        parse({"prompt": "Hi.", "completion": one})
    assert parse({"prompt": "Hi.", "completion": one, "rendered": True}).completion == one


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"text": json.dumps(WHOLE)}, "texts"),
        ({"prompt": "Else.", "completion": WHOLE}, "demonstrations"),
        ({"prompt": WHOLE[:1], "completion": WHOLE}, "demonstrations"),
        ({"prompt": "Else.", "chosen": WHOLE, "rejected": [ASK, assistant("no")]}, "preferences"),
        ({"prompt": [ASK], "chosen": WHOLE, "rejected": [ASK, assistant("no")]}, "preferences"),
    ],
)
def test_a_whole_conversation_in_one_key_is_read_as_its_error_says(row, kind):
    with pytest.raises(BadRecordError) as caught:
        read([row], kind)
    named = str(caught.value).split("columns={")[1].split("}")[0]
    columns = {k: None if v == "null" else v for k, v in (x.split(": ") for x in named.split(", "))}
    source = GivenRows([row], validation_fraction=0.0, columns=columns)
    (record,) = source.records(kind.replace("texts", "demonstrations"), "train")
    assert record.prompt == (ASK,)
