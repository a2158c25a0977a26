"""What a record says is in the text that its template writes, or it is named."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.sources.given import GivenRows
from rlhf_lightning.text.render import ChatTemplateError, render_chat
from tests.builders.encoding import encode_all
from tests.builders.tokenizers import build_tokenizer
from tests.text.conversations import CONVERSATIONS, TOOLS, said

# A letter a conversation: . all is written, L something is lost, R the template refuses it.
# Of templates of one row one is listed.
# As published, by way of TRL (Apache 2.0), from whose installed package they are read.
PUBLISHED = {
    "cohere": ".............LLRRLRRRL",
    "cohere2": ".............LLRRLR.RL",
    "deepseek_r1_distill": ".........LLL.LLLLL...L",
    "deepseekv3": ".........LLL.LL......L",
    "diffusion_gemma": "..................L...",
    "gemma": ".R...........LLRRLRRRL",
    "gemma4": ".............LL...L...",
    "gemma4_v2": ".............LL.......",
    "gptoss": "................L.RL..",
    "idefics3": ".............LLLLL...L",
    "lfm2": ".............LLLLL....",
    "llama3_1": ".............LL.R.....",
    "llava_next": ".............LLRRLR..L",
    "phi3": ".............LLLLLL..L",
    "qwen3": "......................",
    "qwen3_8": "...................R..",
    "qwen3_vl": ".............LL....L..",
}
# What templates of other families do with a message, in a form of our own.
TURNS = "{% for m in messages %}<|{{ m.role }}|>BODY</s>{% endfor %}"
FIRST = "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% endif %}"
LAST = (  # Mistral: the system text stands in the last turn of the user
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages "
    "%}{% if m.role == 'user' %}[INST]{% if m == users[-1] and system %}{{ system }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}"
    "{% endfor %}"
)
THOUGHTS = "{% if m.thinking %}<|channel|>{{ m.thinking }}<|end|>{% endif %}{{ m.content }}"
CALLS = (
    "{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}>"
    "{{ c.function.arguments }}{% endfor %}"
)
SECOND = (  # as Kimi K2 Thinking: the first answer that calls no tool has no thought
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content if loop.index > 2 }}</think>"
    "{% endif %}{{ m.content }}"
)
NEEDS_TOOLS = "{% for t in tools %}{{ t.function | tojson }}{% endfor %}"  # as Hermes 2 Pro
FAMILIES = {
    "SmolLM 2, Granite": (
        TURNS.replace("BODY", "{{ m.content | trim }}"),
        ".............LLLLL...L",
    ),
    "Mistral v3": (FIRST + LAST, ".............LLLLLLL.L"),
    "Harmony": (TURNS.replace("BODY", THOUGHTS), "...............LLL...L"),
    "Kimi K2 Thinking": (TURNS.replace("BODY", SECOND), ".............L.LLL...L"),
    "needs tools": (NEEDS_TOOLS + TURNS.replace("BODY", "{{ m.content }}"), "R" * 21 + "."),
    "Falcon": (
        TURNS.replace("BODY", "{{ m.content.replace('\n\n', '\n') }}"),
        "......L......LLLLL...L",
    ),
    "upper case": (TURNS.replace("BODY", "{{ m.content | upper }}"), "L" * 22),
    "escaped": (TURNS.replace("BODY", "{{ m.content | e }}"), "......L.L....LLLLL...L"),
    "the last two": (
        TURNS.replace("messages", "messages[-2:]").replace("BODY", "{{ m.content }}"),
        ".LL.L......LLLLLLLLLLL",
    ),
}


def row(tokenizer):
    """Return what the template does with each conversation, a letter each."""
    letters = ""
    for name, messages in CONVERSATIONS.items():
        try:
            render_chat(
                tuple(messages),
                tokenizer,
                add_generation_prompt=False,
                variables={"tools": TOOLS} if name == "tools" else {},
                trained=(len(messages) - 1,),
            )
        except ChatTemplateError as error:
            letters += "R" if "refuses" in error.found else "L"
        else:
            letters += "."
    return letters


@pytest.mark.thorough
@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_published_template_does_not_write_is_known(name):
    spec = find_spec("trl")
    file = Path(str(spec and spec.origin)).parent / "chat_templates" / f"{name}.jinja"
    if not file.is_file():
        pytest.skip("TRL, whose package holds the published templates, is not installed")
    tokenizer = build_tokenizer(template=file.read_text())
    assert row(tokenizer) == PUBLISHED[name]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_of_templates_does_not_write_is_known(family):
    template, expected = FAMILIES[family]
    tokenizer = build_tokenizer(template=template)
    assert row(tokenizer) == expected


DROPS_TOOLS = "{% for m in messages if m.role != 'tool' %}{{ m.content }}</s>{% endfor %}"
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTION = [said("user", "2+2?"), said("assistant", "4")]


def encoded(rows, template, **options):
    source = GivenRows([{"messages": row} for row in rows], validation_fraction=0, **options)
    tokenizer = build_tokenizer(template=template)
    return encode_all(source.records("demonstrations", "train"), tokenizer, max_length=400)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_lost_system_text_is_told_of_the_users_turn(role):
    drops = TURNS.replace("messages", "messages if m.role in ['user', 'assistant']")
    row = [said(role, "Be brief."), *QUESTION]
    with pytest.raises(BadRecordError, match=r"does not write.*source\.system_into_user=true"):
        encoded([row], drops.replace("BODY", "{{ m.content }}"))
    with pytest.raises(BadRecordError) as error:
        encoded([[QUESTION[0], said("tool", "12"), QUESTION[1]]], DROPS_TOOLS)
    assert "system_into_user" not in str(error.value)


@pytest.mark.parametrize(
    ("template", "bad"),
    [
        (DROPS_TOOLS, [QUESTION[0], said("tool", "12 degrees"), QUESTION[1]]),
        (STRICT, [said("system", "Be brief."), *QUESTION]),
    ],
)
def test_a_record_that_its_template_does_not_write_is_named_or_left_out(template, bad):
    with pytest.raises(BadRecordError, match=r"the list that was given, row 2: .*on_bad_record"):
        encoded([QUESTION, bad], template)
    rows, report = encoded([QUESTION, bad], template, on_bad_record="skip")
    assert len(rows) == 1
    assert [" row 2: " in message for message in report.skipped] == [True]


def test_a_conversation_that_meets_no_template_is_a_bad_record():
    with pytest.raises(BadRecordError, match=r"row 1: .*no chat template.*model\.chat_template="):
        encoded([QUESTION], None)


LIST = "{% for p in m.content %}{{ p.text }}{% endfor %}"


FUNCTION = TOOLS[0]["function"]


@pytest.mark.parametrize("bare", [FUNCTION, {"type": "function", **FUNCTION}])
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("t | tojson", json.dumps(TOOLS[0])),
        ("t.function.name ~ t.function | tojson", f"weather{json.dumps(FUNCTION)}"),
        ("(t.function or t) | tojson", json.dumps(FUNCTION)),
    ],
)
def test_tools_have_the_shape_in_which_servers_give_them(written, expected, bare):
    tools = "{% for t in tools or [] %}<tool>{{ " + written + " }}{% endfor %}"
    tokenizer = build_tokenizer(template=tools + TURNS.replace("BODY", "{{ m.content }}"))
    text = render_chat(tuple(QUESTION), tokenizer, variables={"tools": [bare, bare]})
    assert text == f"<tool>{expected}" * 2 + "<|user|>2+2?</s><|assistant|>4</s>"


def test_a_shape_that_a_template_does_not_take_is_refused():
    body = "{% if m.role == 'tool' %}{{ m.content[0:] if m.content is not string }}{% else %}"
    of_some = build_tokenizer(template=TURNS.replace("BODY", f"{body}{LIST}{{% endif %}}"))
    with pytest.raises(ChatTemplateError, match=r"message 2 \(tool\), '12 degrees'"):
        render_chat((QUESTION[0], said("tool", "12 degrees"), QUESTION[1]), of_some)
    tools = "{% for t in tools or [] %}{{ t.name ~ t.description ~ t.parameters }}{% endfor %}"
    bare = build_tokenizer(template=tools + TURNS.replace("BODY", "{{ m.content }}"))
    with pytest.raises(ChatTemplateError, match="does not write tools"):
        render_chat(tuple(QUESTION), bare, variables={"tools": TOOLS})


def called(**arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return (QUESTION[0], {**said("assistant", ""), "tool_calls": [call]})


@pytest.mark.parametrize(
    ("written", "arguments", "lost"),
    [
        ("a.values() | join(',')", {"city": "Rome", "days": 3}, ["city", "days"]),
        ("''", {"b": True}, ["b", "true"]),
        ("a.keys() | join(',')", {"x": 1, "b": True, "list": [False]}, ["1", "true", "false"]),
        ("a | tojson", {"x": {"y": True}, "z": [False, None]}, []),
        ("'city=' ~ a.city", {"city": "Rome"}, []),
        ("'on: ' ~ ('yes' if a.on else 'no')", {"on": True}, ["true"]),
    ],
)
def test_names_and_truth_values_of_arguments_are_looked_for(written, arguments, lost):
    call = "{% set a = c.function.arguments %}{{ c.function.name }}({{ " + written + " }})"
    body = "{{ m.content }}{% for c in m.tool_calls or [] %}" + call + "{% endfor %}"
    tokenizer = build_tokenizer(template=TURNS.replace("BODY", body))
    try:
        render_chat(called(**arguments), tokenizer)
        missing = []
    except ChatTemplateError as error:
        missing = [each.rpartition(", ")[2] for each in error.found.split(", nor ")]
    assert sorted(missing) == sorted(map(repr, lost))


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_only_an_answer_may_lose_what_comes_before_the_end_of_a_thought(role):
    template = TURNS.replace("BODY", "{{ m.content.split('</think>')[-1] }}")
    odd = said(role, "Explain the tag </think> to me.")
    messages = [odd, *QUESTION] if role == "system" else [*QUESTION, odd, QUESTION[1]]
    with pytest.raises(ChatTemplateError, match="Explain the tag"):
        render_chat(tuple(messages), build_tokenizer(template=template))
    thought = said("assistant", "<think>Hm.</think>4")
    messages = (QUESTION[0], thought, *QUESTION)
    render_chat(messages, build_tokenizer(template=template), trained=(3,))


def test_a_system_text_may_be_put_into_the_users_turn():
    bad = [said("system", "Be brief."), *QUESTION]
    ((row,), _) = encoded([bad], STRICT, system_into_user=True)
    text = build_tokenizer().decode(row.input_ids)
    assert text.startswith("<|user|>Be brief.\n\n2+2?<|assistant|>4")


def test_arguments_of_a_call_are_learnt_as_the_template_spells_them():
    said_by_it = CALLS.replace("c.function.arguments", "c.function.arguments | tojson")
    template = TURNS.replace("BODY", said_by_it)
    arguments = {"text": 'a "quoted" <b>word</b> & it\'s ü'}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    rows, _ = encoded([[QUESTION[0], {**said("assistant", ""), "tool_calls": [call]}]], template)
    learnt = build_tokenizer().decode(rows[0].input_ids)
    assert json.dumps(arguments, ensure_ascii=False) in learnt
