"""Every key of a row and of its messages is used, refused, or named as unread."""

import json

import pytest

from rlhf_lightning.data.encode import encode_all
from rlhf_lightning.data.errors import BadRecordError, Location
from rlhf_lightning.data.formats import RowParser
from rlhf_lightning.data.sources.given import GivenRows
from rlhf_lightning.data.summary import summarize
from rlhf_lightning.text.templates import unread_keys
from tests.builders.tokenizers import build_tokenizer


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


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


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_is_kept_under_one_key(key):
    completion = parse(conversation(**{key: "look up"})).record.completion
    assert completion == ({**assistant("sunny"), "reasoning_content": "look up"},)


def test_thoughts_that_differ_are_refused():
    with pytest.raises(BadRecordError, match="reasoning_content and thinking"):
        parse(conversation(reasoning_content="a", thinking="b"))


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
    record = parse({"messages": [ASK, {"role": "assistant", "tool_calls": calls}]}).record
    assert record.completion == ({"role": "assistant", "content": "", "tool_calls": [CALL]},)


@pytest.mark.parametrize("calls", ["f()", [{}], ["f"], [{"name": "f", "arguments": "Ulm"}]])
def test_calls_that_are_none_are_refused(calls):
    with pytest.raises(BadRecordError, match=r"messages\[1\]"):
        parse({"messages": [ASK, {**assistant(""), "tool_calls": calls}]})


def test_results_of_tools_keep_whose_they_are():
    result = {"role": "tool", "name": "f", "tool_call_id": "c1", "content": "12"}
    assert parse(conversation({**assistant(""), "tool_calls": [CALL]}, result)).record.prompt[
        2
    ] == (result)


@pytest.mark.parametrize("spell", [lambda x: x, json.dumps])
@pytest.mark.parametrize(("unit", "kept"), [("line", True), ("record", True), ("row", False)])
def test_nulls_that_are_written_are_kept_and_those_that_fill_a_table_are_not(unit, kept, spell):
    arguments = {"town": "Ulm", "unit": None, "parts": [{"a": None}]}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    tool = {"name": "f", "parameters": {"properties": {"unit": {"default": None}}}}
    messages = [ASK, {"role": "assistant", "content": None, "tool_calls": spell([call])}]
    row = {"messages": messages, "tools": spell([tool])}
    record = RowParser()(row, Location("f", 1, unit)).record
    kept = kept or spell is json.dumps
    said = record.completion[0]["tool_calls"][0]["function"]["arguments"]
    assert said == (arguments if kept else {"town": "Ulm", "parts": [{}]})
    assert record.variables["tools"] == [
        tool if kept else {"name": "f", "parameters": {"properties": {"unit": {}}}}
    ]


def test_nulls_of_messages_are_none():
    nulls = dict.fromkeys(["name", "tool_calls", "reasoning_content", "weight", "function_call"])
    assert parse(conversation(**nulls)).record == parse(conversation()).record


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "sun", "image": None}, "ny"]
    assert parse(conversation(content=parts)).record == parse(conversation()).record
    with pytest.raises(BadRecordError, match=r"messages\[1\] has the part"):
        parse(conversation(content=[{"type": "image_url", "image_url": {"url": "x"}}]))


def test_a_function_call_is_refused_and_the_new_key_named():
    legacy = {"name": "f", "arguments": "{}"}
    with pytest.raises(BadRecordError, match=r"function_call.*tool_calls"):
        parse(conversation({**assistant("x"), "function_call": legacy}, user("and?")))


@pytest.mark.parametrize(
    "said",
    [
        '{"name": "f", "arguments": {"town": "Ulm"}}',
        '[{"name": "f", "arguments": "{\\"town\\": \\"Ulm\\"}"}]',
    ],
)
def test_turns_that_say_calls_are_calls(said):
    turns = [("human", "weather?"), ("function_call", said), ("observation", "12"), ("gpt", "warm")]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns]}
    call = {"type": "function", "function": {"name": "f", "arguments": {"town": "Ulm"}}}
    assert read([row], "demonstrations")[0].prompt[1] == {**assistant(""), "tool_calls": [call]}


@pytest.mark.parametrize("said", ["f(Ulm)", '"f"', "[]", '{"town": "Ulm"}', ""])
def test_turns_that_should_say_calls_and_do_not_are_refused(said):
    turns = [("human", "weather?"), ("function_call", said), ("observation", "12"), ("gpt", "warm")]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns]}
    with pytest.raises(BadRecordError, match=r"messages\[1\]"):
        read([row], "demonstrations")


@pytest.mark.parametrize(
    "said", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False}]
)
def test_an_answer_that_is_not_to_be_learnt_is_no_demonstration(said):
    with pytest.raises(BadRecordError, match="weight 0"):
        parse(conversation(**said))
    row = {"prompt": [ASK], "chosen": [{**assistant("a"), **said}], "rejected": [assistant("b")]}
    with pytest.raises(BadRecordError, match="'chosen' has weight 0"):
        parse(row)
    earlier = parse(conversation({**assistant("?"), **said}, user("and?"))).record.prompt
    assert earlier[1]["weight"] == 0
    record = parse(conversation(assistant("?"), user("and?"), **said)).record
    assert (record.prompt, record.completion) == ((ASK,), (assistant("?"),))


@pytest.mark.parametrize(
    "said", [{"weight": 0.5}, {"train": "some"}, {"weight": 1, "train": 0}, {"loss": 0.5}]
)
def test_a_weight_that_is_neither_is_refused(said):
    with pytest.raises(BadRecordError, match="weight"):
        parse(conversation(**said))


@pytest.mark.parametrize("spell", [lambda x: x, json.dumps, repr])
def test_variables_of_the_template_come_from_columns(spell):
    tools, documents = [{"name": "f", "default": None}], [{"title": "T", "text": "x"}]
    row = conversation() | {"tools": spell(tools), "documents": spell(documents)}
    row["history"] = spell([["hi", "it's"]])
    row["chat_template_kwargs"] = spell({"thinking": False, "other": None})
    record = parse(row).record
    assert record.variables == {
        "tools": tools,
        "documents": documents,
        "thinking": False,
    }
    assert record.prompt[:2] == (user("hi"), assistant("it's"))
    assert parse(row, tools=None, documents=None).record.variables == {"thinking": False}


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "add_generation_prompt"])
def test_arguments_of_the_renderer_are_no_variables(name):
    with pytest.raises(BadRecordError, match=f"chat_template_kwargs has '{name}'"):
        parse(conversation() | {"chat_template_kwargs": {name: True}})


def test_a_system_column_is_the_system_message():
    system = {"role": "system", "content": "rhyme"}
    assert parse(conversation() | {"system": "rhyme"}).record.prompt == (system, ASK)
    row = {"messages": [system, ASK, assistant("sunny")], "system": "rhyme"}
    assert parse(row).record.prompt == (system, ASK)
    with pytest.raises(BadRecordError, match="'system'"):
        parse(row | {"system": "do not rhyme"})


@pytest.mark.parametrize("turns", [[["hi", "hello"]], [user("hi"), assistant("hello")]])
def test_history_comes_before_the_prompt(turns):
    record = parse(conversation() | {"history": turns, "system": "rhyme"}).record
    assert [m["content"] for m in record.prompt] == ["rhyme", "hi", "hello", "weather?"]


@pytest.mark.parametrize(
    ("row", "columns", "unread"),
    [
        (
            {"prompt": "p", "completion": "c", "system": "rhyme", "label": "x"},
            {},
            ("system", "label"),
        ),
        ({"instruction": "p", "output": "c", "input": "PASSAGE"}, {}, ()),
        (
            {"instruction": "p", "output": "c", "input": "PASSAGE", "id": ""},
            {"prompt": "instruction", "completion": "output"},
            ("input",),
        ),
        (
            {"instruction": "p", "response": "c", "context": "x", "category": "qa"},
            {},
            ("category",),
        ),
        ({"question": "p", "chosen": "a", "rejected": "b", "margin": 1}, {}, ()),
        ({"instruction": "p", "input": "PASSAGE", "chosen": "a", "rejected": "b"}, {}, ()),
        ({"instruction": "p", "input": "", "chosen": "a", "rejected": "b"}, {}, ()),
        ({"prompt": "p", "prompt_id": 1, **conversation()}, {}, ("prompt", "prompt_id")),
        (conversation() | {"tools": ["f"], "documents": None}, {}, ("tools",)),
        (conversation() | {"functions": [{"name": "f"}]}, {}, ("functions",)),
    ],
)
def test_columns_that_no_record_has_are_unread(row, columns, unread):
    assert parse(row, **columns).unread == unread


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


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "w1", "extra": 1, "system": "x", "history": [["a", "b"]]}, "history system"),
        ({"prompt": "w1", "tools": [{"name": "f"}], "chat_template_kwargs": {"a": 1}},
         "chat_template_kwargs tools"),
        ({"prompt": "w1", "system_prompt": "x", "answer": "w2"}, "system_prompt"),
        ({"prompt": [ASK], "system": "x", "systemPrompt": "x", "tools": ["f"]},
         "systemPrompt tools"),
        ({"text": "w1", "system": "x", "extra": 1}, "system"),
    ],
)  # fmt: skip
def test_a_part_of_a_conversation_beside_prompts_and_texts_is_named(row, named):
    tokenizer = build_tokenizer(template=WRITES_ALL)
    records = read([row], "texts" if "text" in row else "prompts")
    report = encode_all(records, tokenizer, max_length=300)[1]
    assert sorted(report.unread_columns) == named.split()


def test_a_system_column_that_is_mapped_beside_plain_texts_is_named_once(caplog):
    rows = [{"prompt": f"w{i}", "completion": "c", "asked": "rhyme"} for i in range(3)]
    columns = {"system": "asked"}
    GivenRows(rows, validation_fraction=0, columns=columns).records("prompts", "train")
    (said,) = [record.getMessage() for record in caplog.records]
    assert "'asked' is mapped to system, and is not read" in said
    caplog.clear()
    chat = [{**conversation(), "asked": "rhyme"}]
    source = GivenRows(chat, validation_fraction=0, columns=columns)
    (record,) = source.records("prompts", "train")
    assert record.prompt == ({"role": "system", "content": "rhyme"}, ASK)
    assert not caplog.records


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


def test_a_key_of_a_message_that_the_template_names_is_read():
    template = WRITES_ALL.replace("{{ m.content }}", "{% if m.flag %}!{% endif %}{{ m.content }}")
    message = user("hi") | {"flag": True, "mood": 1}
    tokenizer = build_tokenizer(template=template)
    assert list(unread_keys([message, assistant("ho")], {}, tokenizer)) == ["mood"]


@pytest.mark.parametrize("labelled", [True, False])
def test_unpaired_rows_keep_the_variables_of_the_template(labelled):
    def row(number):
        prompt = [{"role": "user", "content": f"q{number}"}]
        answers = {"completion": [assistant("a")], "label": number % 2 == 0}
        if not labelled:
            answers = {"chosen": [assistant("a")], "rejected": [assistant("b")]}
        return {
            "prompt": prompt,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            **answers,
        }

    source = GivenRows([row(n) for n in range(4)], validation_fraction=0.0)
    records = source.records("unpaired", "train")
    assert all(record.variables["tools"][0]["function"]["name"] == "f" for record in records)
