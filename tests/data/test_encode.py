from __future__ import annotations

import pytest

from rlhf_lightning.data.encode import (
    IDENTICAL,
    NO_TOKENS,
    RESPONSE_TOO_LONG,
    EncodingReport,
    encode_prompt,
)
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    PromptRecord,
    TextRecord,
)
from rlhf_lightning.text.tokens import prompt_ids
from tests.builders.encoding import assistant, encode_all, encode_one, user

WIDE = {"max_length": 1000}


def learnt(encoded, tokenizer):
    return tokenizer.decode(encoded.input_ids[encoded.loss_mask].tolist())


def chat(prompt="why?", answer="so"):
    return DemonstrationRecord((user(prompt),), (assistant(answer),))


@pytest.mark.parametrize("pad_is_eos", [True, False])
def test_the_answer_and_its_eos_are_learnt_also_where_pad_is_eos(make_tokenizer, pad_is_eos):
    tokenizer = make_tokenizer(pad_is_eos=pad_is_eos)
    encoded = encode_one(DemonstrationRecord("why?", " so"), tokenizer, **WIDE)
    assert tokenizer.decode(encoded.input_ids.tolist()) == "why? so<|im_end|>"
    assert learnt(encoded, tokenizer) == " so<|im_end|>"
    assert encoded.input_ids[-1] == tokenizer.eos_token_id
    assert encoded.loss_mask[-1]


@pytest.mark.parametrize("adds_eos", [True, False])
def test_a_plain_prompt_has_bos_once_and_never_an_eos(make_tokenizer, adds_eos):
    tokenizer = make_tokenizer(adds_bos=True, adds_eos=adds_eos)
    for prompt in ("why?", "<s>why?"):
        ids = prompt_ids(prompt, tokenizer, rendered=True)
        assert tokenizer.decode(ids) == "<s>why?"
        record = DemonstrationRecord(prompt, " so", rendered=True)
        encoded = encode_one(record, tokenizer, **WIDE)
        assert tokenizer.decode(encoded.input_ids.tolist()) == "<s>why? so<|im_end|>"


def test_a_template_that_writes_bos_gets_no_second_one_from_the_tokenizer(make_tokenizer):
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = make_tokenizer(adds_bos=True, adds_eos=True, template=template)
    encoded = encode_one(chat(), tokenizer, **WIDE)
    assert tokenizer.decode(encoded.input_ids.tolist()) == "<s>[user]why?[assistant]so<|im_end|>"
    assert encoded.input_ids.tolist().count(tokenizer.bos_token_id) == 1


def test_a_conversation_is_learnt_up_to_the_end_of_the_turn_and_not_behind_it(tokenizer):
    encoded = encode_one(chat(), tokenizer, **WIDE)
    assert tokenizer.decode(encoded.input_ids.tolist()) == (
        "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\nso<|im_end|>"
    )
    assert learnt(encoded, tokenizer) == "so<|im_end|>"


def test_a_template_without_eos_gets_one(make_tokenizer):
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = make_tokenizer(template=template)
    encoded = encode_one(chat(), tokenizer, **WIDE)
    assert learnt(encoded, tokenizer) == "so\n<|im_end|>"


def test_a_template_that_does_not_keep_the_prompt_is_an_error_that_shows_both(make_tokenizer):
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: <think>{% endif %}"
    )
    tokenizer = make_tokenizer(template=template)
    with pytest.raises(ValueError, match="does not keep the prompt") as error:
        encode_one(chat(), tokenizer, **WIDE)
    assert "assistant: <think>" in str(error.value)
    assert "assistant: so" in str(error.value)


def test_a_token_that_ends_the_prompt_and_starts_the_answer_belongs_to_the_answer(make_tokenizer):
    template = (
        "{% for m in messages %}{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    tokenizer = make_tokenizer(template=template, merges=[("Ċ", "Ċ")])
    assert len(tokenizer("\n\n").input_ids) == 1
    rows, report = encode_all([chat(answer="\nso"), chat(answer="so")], tokenizer, **WIDE)
    assert [learnt(row, tokenizer) for row in rows] == ["\n\nso<|im_end|>", "so<|im_end|>"]
    assert report.num_merged == 1
    pair = PreferenceRecord((user("why?"),), (assistant("\nso"),), (assistant("no"),))
    (row,), report = encode_all([pair], tokenizer, **WIDE)
    sides = (row.chosen_input_ids.tolist(), row.rejected_input_ids.tolist())
    assert [tokenizer.decode(side[row.prompt_length :]) for side in sides] == [
        "\n\nso<|im_end|>",
        "\nno<|im_end|>",
    ]
    assert len({tuple(side[: row.prompt_length]) for side in sides}) == 1
    assert report.num_merged == 1


def test_a_text_is_learnt_whole_but_for_the_token_that_has_nothing_before_it(make_tokenizer):
    for adds_bos, expected in ((True, "once<|im_end|>"), (False, "nce<|im_end|>")):
        tokenizer = make_tokenizer(adds_bos=adds_bos)
        ((encoded,), _) = encode_all([TextRecord("once", "d")], tokenizer, **WIDE)
        assert learnt(encoded, tokenizer) == expected
        assert encoded.domain == "d"


def test_an_empty_prompt_becomes_bos_so_that_the_first_token_can_be_learnt(make_tokenizer):
    record = DemonstrationRecord("", "so")
    tokenizer = make_tokenizer()
    encoded = encode_one(record, tokenizer, **WIDE)
    assert encoded.input_ids[0] == tokenizer.bos_token_id
    assert learnt(encoded, tokenizer) == "so<|im_end|>"
    tokenizer.bos_token = None
    encoded = encode_one(record, tokenizer, **WIDE)
    assert learnt(encoded, tokenizer) == "o<|im_end|>"


def test_truncation_cuts_the_prompt_from_the_left_and_never_the_answer(make_tokenizer):
    tokenizer = make_tokenizer()
    options = {"max_length": 7, "over_long": "truncate_left"}
    report = EncodingReport()
    record = DemonstrationRecord("abcdef", "xyz")
    encoded = encode_one(record, tokenizer, **options, report=report)
    assert tokenizer.decode(encoded.input_ids.tolist()) == "defxyz<|im_end|>"
    assert learnt(encoded, tokenizer) == "xyz<|im_end|>"
    pair = encode_one(PreferenceRecord("abcdef", "x", "xyz"), tokenizer, **options)
    assert tokenizer.decode(pair.chosen_input_ids.tolist()) == "defx<|im_end|>"
    assert tokenizer.decode(pair.rejected_input_ids.tolist()) == "defxyz<|im_end|>"
    prompt = encode_prompt(PromptRecord("abcdefghi"), tokenizer, **options)
    assert tokenizer.decode(prompt.input_ids.tolist()) == "cdefghi"
    ((text,), _) = encode_all([TextRecord("abcdefghi")], tokenizer, **options)
    assert tokenizer.decode(text.input_ids.tolist()) == "defghi<|im_end|>"
    assert report.num_truncated == 1


def test_truncation_keeps_the_bos_that_marks_the_start(make_tokenizer):
    tokenizer = make_tokenizer(adds_bos=True)
    prompt = encode_prompt(
        PromptRecord("abcdef"), tokenizer, max_length=4, over_long="truncate_left"
    )
    assert tokenizer.decode(prompt.input_ids.tolist()) == "<s>def"


@pytest.mark.parametrize("completion", ["abcd", "abcde"])
def test_an_answer_that_fills_max_length_alone_is_dropped_even_when_cutting(tokenizer, completion):
    report = EncodingReport()
    record = DemonstrationRecord("why?", completion)
    encoded = encode_one(record, tokenizer, max_length=5, over_long="truncate_left", report=report)
    assert encoded is None
    assert report.dropped == {RESPONSE_TOO_LONG: 1}


def test_sides_that_differ_in_nothing_the_model_sees_are_dropped(tokenizer):
    report = EncodingReport()
    record = PreferenceRecord("why?", " so", " so<|im_end|>", rendered=True)
    assert encode_one(record, tokenizer, **WIDE, report=report) is None
    assert report.dropped == {IDENTICAL: 1}


def test_a_prompt_without_a_token_is_dropped(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.bos_token = None
    report = EncodingReport()
    assert encode_prompt(PromptRecord(""), tokenizer, **WIDE, report=report) is None
    assert report.dropped == {NO_TOKENS: 1}


def test_labels_sum_to_the_response_lengths_with_eos(tokenizer):
    answers = ["", "a", "bcd", "efghi"]
    rows, _ = encode_all([DemonstrationRecord("why?", a) for a in answers], tokenizer, **WIDE)
    assert [int(row.loss_mask.sum()) for row in rows] == [len(a) + 1 for a in answers]


@pytest.mark.parametrize(
    ("options", "record", "message"),
    [
        ({"eos": None}, DemonstrationRecord("a", "b"), "no EOS token"),
        ({}, chat(), "no chat template"),
    ],
)
def test_a_tokenizer_that_lacks_what_is_needed_is_an_error(
    make_tokenizer, options, record, message
):
    with pytest.raises(ValueError, match=f"record 1: .*{message}"):
        encode_all([record], make_tokenizer(**options), **WIDE)
