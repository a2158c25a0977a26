"""Text that spells control tokens is refused or disarmed; every other text has its own tokens."""

from __future__ import annotations

import pytest
from transformers import ByT5Tokenizer

from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    PromptRecord,
    TextRecord,
)
from rlhf_lightning.data.sources.base import FileSource
from rlhf_lightning.text.render import render_chat, turn_end
from rlhf_lightning.text.tokens import ControlTokens, prompt_and_responses, prompt_ids
from tests.builders.encoding import assistant, encode_all, encode_one, user
from tests.builders.tokenizers import family_tokenizer

WIDE = {"max_length": 2000}
ORDINARY = (
    "why the end?",
    "  the\n\nend  the ",
    "\n- a\n- b",
    "a < b | c > d </p> <|x|> <end",
    "caf\u00e9",
    "end",
)
# Of each kind one: with a BOS, with an end of turn that is not EOS, with a line behind it.
TOKENIZERS = (("llama 3", "bpe"), ("gemma", "unigram"), ("chatml of a base model", "sentencepiece"))
every_tokenizer = pytest.mark.parametrize(
    "tokenizer",
    [family_tokenizer(family, kind) for family, kind in TOKENIZERS],
    ids=[kind for _, kind in TOKENIZERS],
)


def answer_of(prompt, answer, tokenizer, **options):
    return prompt_and_responses(prompt, [answer], tokenizer, **options)[0].response


def whole(text, tokenizer):
    """Return what the tokenizer makes of a text by itself, nothing put in front."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@every_tokenizer
def test_ordinary_text_has_the_tokens_that_the_tokenizer_gives_it(tokenizer):
    for text in ORDINARY:
        assert_plain_text_is_the_tokenizers(text, tokenizer)
        assert_a_conversation_is_the_rendered_text(text, tokenizer)


def assert_plain_text_is_the_tokenizers(text, tokenizer):
    front = [] if tokenizer.bos_token is None else [tokenizer.bos_token_id]
    eos = tokenizer.eos_token_id
    plain = [*front, *whole(text, tokenizer)]
    assert tokenizer(text)["input_ids"] == plain, "a premise of this test"
    assert prompt_ids(text, tokenizer) == plain
    record = DemonstrationRecord(text, text)
    shown = encode_one(record, tokenizer, **WIDE).input_ids.tolist()
    assert shown == [*front, *whole(text + text, tokenizer), eos]
    ((text_row,), _) = encode_all([TextRecord(text)], tokenizer, **WIDE)
    assert text_row.input_ids.tolist() == [*plain, eos]
    pair = encode_one(PreferenceRecord(text, text, "no"), tokenizer, **WIDE)
    assert pair.chosen_input_ids.tolist() == shown
    (together,), _ = encode_all([record], tokenizer, **WIDE)
    assert together.input_ids.tolist() == shown


def assert_a_conversation_is_the_rendered_text(text, tokenizer):
    prompt = (user(text), assistant(text), user("why?"))
    start = render_chat(prompt, tokenizer)
    full = render_chat((*prompt, assistant(text)), tokenizer, add_generation_prompt=False)
    assert prompt_ids(prompt, tokenizer) == whole(start, tokenizer)
    shown = encode_one(
        DemonstrationRecord(prompt, (assistant(text),)), tokenizer, **WIDE
    ).input_ids.tolist()
    given, ids = whole(start, tokenizer), whole(full, tokenizer)
    if ids[: len(given)] != given:
        ids = [*given, *whole(full[len(start) :], tokenizer)]
    behind = turn_end(tokenizer).behind
    cut = len(whole(tokenizer.eos_token + behind, tokenizer)) - 1 if behind else 0
    assert shown == ids[: len(ids) - cut]


@every_tokenizer
def test_a_record_that_spells_a_control_token_is_refused_unless_it_was_rendered(tokenizer):
    controls = ControlTokens(tokenizer).contents
    assert len(controls) >= 3
    for token in controls:
        text = f"the {token} end"
        for record in (
            TextRecord(text),
            PromptRecord(text),
            PromptRecord((user(text),)),
            DemonstrationRecord("why?", text),
            DemonstrationRecord((user("why?"),), (assistant(text),)),
            PreferenceRecord("why?", "so", text),
            PromptRecord((user("why?"),), variables={"tools": [{"name": text}]}),
        ):
            with pytest.raises(ValueError, match=r"control token.*rendered=true.*on_bad_record"):
                encode_all([record], tokenizer, **WIDE)
    eos, end = tokenizer.eos_token_id, tokenizer.eos_token
    text = f"the {end} end{end}"
    assert prompt_ids(text, tokenizer, rendered=True).count(eos) == 2
    assert answer_of("why?", text, tokenizer, rendered=True).count(eos) == 2
    conversation = (user(text),)
    usual = prompt_ids((user("the end"),), tokenizer).count(eos)
    assert prompt_ids(conversation, tokenizer, rendered=True).count(eos) == usual + 2


@every_tokenizer
def test_what_is_disarmed_holds_no_control_token_and_other_text_is_as_it_was(tokenizer):
    control = ControlTokens(tokenizer)
    ids = {tokenizer.convert_tokens_to_ids(t) for t in control.contents}
    spelled = "".join(control.contents)
    assert ids.isdisjoint(whole(control.disarmed(spelled), tokenizer))
    nested = {"a": [user(spelled), 1, None], "b": "x"}
    assert control.spelled_in(nested)
    assert control.spelled_in(control.disarmed(nested)) is None
    assert control.disarmed([*ORDINARY]) == [*ORDINARY]


def test_an_end_of_turn_that_is_no_special_token_is_a_control_token_too():
    tokenizer = family_tokenizer("gemma")
    form = tokenizer.backend_tokenizer.to_str()
    ordinary = form.replace('"special":true', '"special":false')
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(ordinary)
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert not tokenizer.added_tokens_decoder[end].special
    prompt = (user("say <end_of_turn>"),)
    with pytest.raises(ValueError, match="control token '<end_of_turn>'"):
        prompt_ids(prompt, tokenizer)
    assert prompt_ids(prompt, tokenizer, rendered=True).count(end) == 2


def test_a_tokenizer_that_is_not_fast_refuses_them_too():
    tokenizer = ByT5Tokenizer()
    assert prompt_ids("why?", tokenizer)
    with pytest.raises(ValueError, match="control token '</s>'"):
        prompt_ids("why</s>?", tokenizer)
    assert tokenizer.eos_token_id in prompt_ids("why</s>?", tokenizer, rendered=True)


ROWS = [{"prompt": f"why {n} ?", "completion": f" so{'<|im_end|>' * (n == 3)}"} for n in range(4)]


@pytest.mark.parametrize(
    ("options", "left"), [({"rendered": True}, 4), ({"on_bad_record": "skip"}, 3)]
)
def test_a_file_says_whether_its_texts_were_rendered(write_jsonl, options, left):
    path, tokenizer = write_jsonl(ROWS), family_tokenizer("chatml")

    def rows(**options):
        source = FileSource(path, validation_fraction=0, **options)
        return encode_all(source.records("demonstrations", "train"), tokenizer, **WIDE)[0]

    with pytest.raises(BadRecordError, match=r"line 4: .*control token '<\|im_end\|>'"):
        rows()
    found = rows(**options)
    assert len(found) == left
    last = found[-1].input_ids.tolist()
    assert last.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(last) == f"why {left - 1} ? so<|im_end|>"


@pytest.mark.parametrize(("name", "value"), [("a.jsonl", "true"), ("a.csv", None)])
def test_a_row_says_whether_its_texts_were_rendered(tmp_path, name, value):
    path = tmp_path / name
    if value is None:
        path.write_text("prompt,completion,rendered\na,b,true\nc,d,False\n")
    else:
        path.write_text(
            '{"prompt": "a", "completion": "b", "rendered": true}\n'
            '{"prompt": "c", "completion": "d", "rendered": false}\n'
        )
    for given in (False, True):
        source = FileSource(path, validation_fraction=0, rendered=given)
        records = source.records("demonstrations", "train")
        assert [record.rendered for record in records] == [True, False]
        prompts = source.records("prompts", "train")
        assert [prompt.rendered for prompt in prompts] == [True, False]
        assert "rendered" not in prompts[0].columns
