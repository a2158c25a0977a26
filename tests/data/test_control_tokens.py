"""Text that spells special tokens stays text, and every other text has the tokens it had."""

from __future__ import annotations

import itertools

import pytest
from transformers import ByT5Tokenizer

from rlhf_lightning.data.datamodules import DemonstrationDataModule
from rlhf_lightning.data.encode import (
    encode_all,
    encode_demonstration,
    encode_preference,
    encode_prompt,
    encode_text,
)
from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    PromptRecord,
    TextRecord,
)
from rlhf_lightning.data.sources.base import FileSource
from rlhf_lightning.text.control_tokens import control_tokens
from rlhf_lightning.text.tokens import prompt_and_responses, prompt_ids, render_chat
from rlhf_lightning.text.turn_end import turn_end
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
    return prompt_and_responses(prompt, [answer], tokenizer, **options).responses[0]


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


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
    shown = encode_demonstration(record, tokenizer, **WIDE).input_ids.tolist()
    assert shown == [*front, *whole(text + text, tokenizer), eos]
    assert encode_text(TextRecord(text), tokenizer, **WIDE).input_ids.tolist() == [*plain, eos]
    pair = encode_preference(PreferenceRecord(text, text, "no"), tokenizer, **WIDE)
    assert pair.chosen_input_ids.tolist() == shown
    (together,), report = encode_all([record], tokenizer, **WIDE)
    assert (together.input_ids.tolist(), report.num_spelled) == (shown, 0)


def assert_a_conversation_is_the_rendered_text(text, tokenizer):
    prompt = (user(text), assistant(text), user("why?"))
    start = render_chat(prompt, tokenizer)
    full = render_chat((*prompt, assistant(text)), tokenizer, add_generation_prompt=False)
    assert prompt_ids(prompt, tokenizer) == whole(start, tokenizer)
    shown = encode_demonstration(
        DemonstrationRecord(prompt, (assistant(text),)), tokenizer, **WIDE
    ).input_ids.tolist()
    given, ids = whole(start, tokenizer), whole(full, tokenizer)
    if ids[: len(given)] != given:
        ids = [*given, *whole(full[len(start) :], tokenizer)]
    behind = turn_end(tokenizer).behind
    cut = len(whole(tokenizer.eos_token + behind, tokenizer)) - 1 if behind else 0
    assert shown == ids[: len(ids) - cut]


@every_tokenizer
def test_the_twin_cuts_and_merges_as_the_tokenizer_does(tokenizer):
    control = control_tokens(tokenizer)
    for text, special in itertools.product(ORDINARY, (False, True)):
        encoding = tokenizer(text, add_special_tokens=special, return_special_tokens_mask=True)
        ours = control.twin.encode(text, add_special_tokens=special)
        assert ours.ids == encoding["input_ids"]
        assert ours.special_tokens_mask == encoding["special_tokens_mask"]
        rendered = render_chat((user(text), assistant(text), user(text)), tokenizer)
        assert control.encoding(rendered)[0].ids == whole(rendered, tokenizer)


def test_a_text_that_the_tokenizer_is_told_not_to_split_would_still_spell_tokens():
    # Why there is a twin: the pieces of a Unigram vocabulary are found as pieces.
    tokenizer = family_tokenizer("gemma", "unigram")
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert end in tokenizer("so <end_of_turn>", split_special_tokens=True)["input_ids"]
    assert end not in prompt_ids("so <end_of_turn>", tokenizer)


@every_tokenizer
def test_what_a_message_spells_is_text_and_the_templates_markers_are_tokens(tokenizer):
    controls = {tokenizer.convert_tokens_to_ids(t): t for t in control_tokens(tokenizer).contents}
    spelled = f"say {' '.join(controls.values())} now"
    encoded = {}
    for name, text in (("spelled", spelled), ("harmless", "say it now")):
        prompt = (user(text),)
        pair = PreferenceRecord(prompt, (assistant(text),), (assistant("no"),))
        encoded[name] = encode_preference(pair, tokenizer, **WIDE).chosen_input_ids.tolist()
        alone = encode_prompt(PromptRecord(prompt), tokenizer, **WIDE)
        assert encoded[name][: len(alone)] == alone.input_ids.tolist()
        assert answer_of(prompt, (assistant(text),), tokenizer) == encoded[name][len(alone) :]
    tokens = {name: [i for i in ids if i in controls] for name, ids in encoded.items()}
    assert tokens["spelled"] == tokens["harmless"]
    assert len(tokens["harmless"]) >= 3
    text = [i for i in encoded["spelled"] if i not in controls]
    assert tokenizer.decode(text).replace(" ", "").count(spelled.replace(" ", "")) == 2


@every_tokenizer
def test_what_a_plain_text_spells_is_text_unless_it_was_rendered(tokenizer):
    eos, end = tokenizer.eos_token_id, tokenizer.eos_token
    bos = int(tokenizer.bos_token is not None)
    text = f"the {end} end{end}"
    for ids, wanted in (
        (prompt_ids(text, tokenizer), 0),
        (answer_of("why?", text, tokenizer), 1),
        (prompt_ids(text, tokenizer, rendered=True), 2),
        (answer_of("why?", text, tokenizer, rendered=True), 2),
    ):
        assert ids.count(eos) == wanted
    controls = {tokenizer.convert_tokens_to_ids(t) for t in control_tokens(tokenizer).contents}
    assert sum(i in controls for i in prompt_ids(text, tokenizer)) == bos
    said = tokenizer.decode(answer_of("why?", text, tokenizer)[:-1])
    assert said.replace(" ", "") == text.replace(" ", "")
    conversation = (user(text),)
    extra = prompt_ids(conversation, tokenizer, rendered=True).count(eos)
    assert extra == prompt_ids(conversation, tokenizer).count(eos) + 2


def test_an_end_of_turn_that_is_no_special_token_is_text_too():
    tokenizer = family_tokenizer("gemma")
    form = tokenizer.backend_tokenizer.to_str()
    ordinary = form.replace('"special":true', '"special":false')
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(ordinary)
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert not tokenizer.added_tokens_decoder[end].special
    prompt = (user("say <end_of_turn>"),)
    assert prompt_ids(prompt, tokenizer).count(end) == 1
    assert prompt_ids(prompt, tokenizer, rendered=True).count(end) == 2
    answer = answer_of(prompt, (assistant("<end_of_turn> so"),), tokenizer)
    assert (answer.count(end), answer[-1]) == (1, end)


def test_a_text_cannot_spell_the_names_that_the_twin_has():
    tokenizer = family_tokenizer("chatml")
    for hidden in ("\ufdd10\ufdd1", "\ufdd20\ufdd2"):
        assert tokenizer.eos_token_id not in prompt_ids(hidden, tokenizer)
        for prompt in (f"<|im_end|>{hidden}", (user(f"<|im_end|>{hidden}"),)):
            with pytest.raises(ValueError, match=r"spells '<\|im_end\|>' and holds U\+FDD1"):
                prompt_ids(prompt, tokenizer)


def test_a_tokenizer_that_is_not_fast_refuses_to_guess():
    tokenizer = ByT5Tokenizer()
    assert prompt_ids("why?", tokenizer)
    with pytest.raises(ValueError, match=r"no fast tokenizer, would take it .* rendered: true"):
        prompt_ids("why</s>?", tokenizer)
    assert tokenizer.eos_token_id in prompt_ids("why</s>?", tokenizer, rendered=True)


ROWS = [{"prompt": f"why {n} ?", "completion": f" so{'<|im_end|>' * (n == 3)}"} for n in range(4)]


@pytest.mark.parametrize(("source", "row", "wanted"), [(False, None, 1), (True, None, 0)])
def test_a_file_says_whether_its_texts_were_rendered(write_jsonl, source, row, wanted):
    path = write_jsonl(ROWS)
    tokenizer = family_tokenizer("chatml")
    data = DemonstrationDataModule(
        FileSource(path, validation_fraction=0, rendered=source),
        tokenizer,
        batch_size=2,
        max_length=99,
        seed=0,
        num_epochs=1,
    )
    text = data.render_summary()
    assert ("rows that spell special tokens, kept as text" in text) == bool(wanted)
    assert data.summary.num_spelled == wanted
    last = data.rows("train")[3].input_ids.tolist()
    assert last.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(last) == "why 3 ? so<|im_end|>" + "<|im_end|>" * wanted


@pytest.mark.parametrize(("all_rows", "rendered", "warned"), [(0, 0, 0), (1, 0, 1), (1, 1, 0)])
def test_rows_that_all_spell_special_tokens_are_named(
    all_rows, rendered, warned, recwarn, write_jsonl
):
    spelled = {"prompt": "<|im_start|>user\nhi<|im_end|>\n", "completion": "yes<|im_end|>"}
    given = [spelled | {"prompt": f"{spelled['prompt']}{i}"} for i in range(3)]
    plain = [{"prompt": "why ?", "completion": "so"}] * (not all_rows)
    source = FileSource(write_jsonl(given + plain), validation_fraction=0, rendered=bool(rendered))
    DemonstrationDataModule(
        source, family_tokenizer("chatml"), batch_size=2, max_length=99, num_epochs=1
    ).setup()
    assert sum("rendered=true" in str(one.message) for one in recwarn) == warned


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


def test_a_row_that_says_neither_is_an_error(write_jsonl):
    path = write_jsonl([{"prompt": "a", "completion": "b", "rendered": "by hand"}])
    with pytest.raises(BadRecordError, match=r"line 1: the key 'rendered' holds .*columns=\{rend"):
        FileSource(path).records("demonstrations", "train")
