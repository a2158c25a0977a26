"""Prompt and answer are one text: what is learnt is what the data says, with every tokenizer."""

from __future__ import annotations

import itertools

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from rlhf_lightning.data.records import DemonstrationRecord
from rlhf_lightning.text.tokens import prompt_and_responses, prompt_ids
from tests.builders.encoding import encode_all
from tests.builders.models import tiny_tokenizer

WIDE = {"max_length": 1000}
PROMPTS = (
    "2+2=",
    "Say ",
    "Say\n",
    "Say:\n\n",
    "a\n \n",
    "f(",
    "日",
    "👩\u200d",
    "cafe",
    "a  ",
    "",
    "1",
    "é",
)
ANSWERS = ("4", " 4", "\n4", "  4", "23", ")", "本 x", "👩", "\u0301 so", "x", "")
SPECIAL = ("<unk>", "<s>", "</s>", "<x>")


def byte_fallback(**scheme):
    """BPE as SentencePiece writes it, with a token for each byte."""
    merges = [("▁", "4"), ("▁", "▁"), ("2", "3"), ("=", "4"), ("f", "(")]
    pieces = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), "▁", *map(chr, range(33, 127))]
    pieces += ["日", "".join(("▁", "4")), "▁▁", "23", "=4", "f("]
    core = Tokenizer(
        models.BPE(
            {p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True
        )
    )
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    core.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    if scheme:
        core.pre_tokenizer = pre_tokenizers.Metaspace(split=False, **scheme)
    else:
        prepend = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        core.normalizer = normalizers.Sequence(prepend)
    return core


def byte_level(*, add_prefix_space, trim=False):
    merges = [("Ġ", "4"), ("2", "3"), ("=", "4"), ("Ċ", "Ċ"), ("1", "2")]
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    core = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=trim)
    return core


def unigram():
    pieces = [*SPECIAL, "▁", "▁4", "23", *map(chr, range(33, 127)), "日", "本", "é", "👩", "\u200d"]
    core = Tokenizer(models.Unigram([(p, -float(len(p) < 2)) for p in pieces], 0))
    core.normalizer = normalizers.NFKC()
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    return core


def word_piece():
    pieces = [
        *SPECIAL,
        *map(chr, range(33, 127)),
        *(f"##{chr(i)}" for i in range(33, 127)),
        "2",
        "日",
    ]
    pieces = list(dict.fromkeys(pieces))
    core = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece(cleanup=False)
    return core


KINDS = {
    "prepend": byte_fallback,
    "metaspace always": lambda: byte_fallback(prepend_scheme="always"),
    "metaspace first": lambda: byte_fallback(prepend_scheme="first"),
    "byte level": lambda: byte_level(add_prefix_space=False),
    "byte level with a space in front": lambda: byte_level(add_prefix_space=True),
    "byte level of RoBERTa": lambda: byte_level(add_prefix_space=True, trim=True),
    "unigram": unigram,
    "word pieces": word_piece,
}


def made(kind, *, bos=False, eos=False, template=None, **added):
    core = KINDS[kind]()
    core.add_special_tokens([AddedToken(token, normalized=False, **added) for token in SPECIAL])
    if bos or eos:
        single = f"{'<s> ' * bos}$A{' </s>' * eos}"
        ids = [(token, core.token_to_id(token)) for token in ("<s>", "</s>")]
        own = [] if core.post_processor is None else [core.post_processor]
        wrapped = processors.TemplateProcessing(single=single, special_tokens=ids)
        core.post_processor = processors.Sequence([*own, wrapped])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="module")
def tokenizers():
    return {kind: made(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_answer_have_the_tokens_of_one_text(tokenizers, kind):
    tokenizer = tokenizers[kind]
    cases = list(itertools.product(PROMPTS, ANSWERS))
    rows, _ = encode_all([DemonstrationRecord(*case) for case in cases], tokenizer, **WIDE)
    for (prompt, answer), row in zip(cases, rows, strict=True):
        whole = tokenizer(prompt + answer, add_special_tokens=False).input_ids
        given = [] if row.input_ids[0] != tokenizer.bos_token_id else [tokenizer.bos_token_id]
        assert row.input_ids.tolist() == [*given, *whole, tokenizer.eos_token_id], (prompt, answer)


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompt_is_the_policys_where_no_token_is_of_both(tokenizers, kind):
    tokenizer = tokenizers[kind]
    merged = set()
    for prompt, answer in itertools.product(PROMPTS, ANSWERS):
        (found,) = prompt_and_responses(prompt, [answer], tokenizer)
        alone = prompt_ids(prompt, tokenizer)
        if found.is_merged:
            merged.add((prompt, answer))
        # Several unknown characters are one token.
        elif tokenizer.unk_token_id not in alone and "RoBERTa" not in kind:
            assert found.prompt == alone, (prompt, answer)
    # White space is no part of a word piece, and RoBERTa's tokens do not say that they hold it.
    assert ("Say ", "4") in merged or kind in ("word pieces", "byte level of RoBERTa")
    assert ("2+2=", " 4") not in merged


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_of_a_pair_share_the_tokens_of_the_prompt(tokenizers, kind):
    tokenizer = tokenizers[kind]
    for prompt, (chosen, rejected) in itertools.product(
        PROMPTS, itertools.combinations(ANSWERS, 2)
    ):
        found = prompt_and_responses(prompt, [chosen, rejected], tokenizer)
        assert found[0].prompt == found[1].prompt
        for answer, row in zip((chosen, rejected), found, strict=True):
            whole = tokenizer(prompt + answer, add_special_tokens=False).input_ids
            front = [tokenizer.bos_token_id] * (row.prompt[:1] == [tokenizer.bos_token_id])
            assert row.ids == [*front, *whole, tokenizer.eos_token_id]


@pytest.mark.parametrize("kind", ["prepend", "byte level"])
def test_special_tokens_around_a_text_stay_at_its_front_alone(kind):
    tokenizer = made(kind, bos=True, eos=True)
    found = prompt_and_responses("2+2=", ["4", " 4"], tokenizer)
    eos = tokenizer.eos_token_id
    for row in found:
        assert row.prompt[0] == tokenizer.bos_token_id
        assert (row.prompt.count(eos), row.response.count(eos)) == (0, 1)
    (empty,) = prompt_and_responses("", ["4"], tokenizer)
    assert empty.prompt == [tokenizer.bos_token_id]
    (spelled,) = prompt_and_responses("<s>2+2=", ["4"], tokenizer, rendered=True)
    assert spelled.prompt.count(tokenizer.bos_token_id) == 1


def test_what_the_boundary_spells_is_refused():
    with pytest.raises(ValueError, match="control token '</s>'"):
        prompt_and_responses("say </", ["s> now"], made("byte level"))


def test_a_control_token_that_takes_white_space_behind_it_is_the_prompts():
    template = (
        "{% for m in messages %}{{ m['role'] }}<x>\n{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant<x>\n{% endif %}"
    )
    tokenizer = made("prepend", template=template, rstrip=True)
    prompt = ({"role": "user", "content": "2+2="},)
    for content in ("4", "\n4"):
        (found,) = prompt_and_responses(
            prompt, [({"role": "assistant", "content": content},)], tokenizer
        )
        assert found.prompt == prompt_ids(prompt, tokenizer)
        assert tokenizer.convert_ids_to_tokens(found.response) == ["▁4", "</s>"]
        assert not found.is_merged


def test_a_tokenizer_without_offsets_is_cut_where_the_tokens_part(monkeypatch):
    tokenizer = made("byte level")
    wanted = [prompt_and_responses(p, ["4"], tokenizer) for p in ("2+2=", "1", "Say ", "")]
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    call = type(tokenizer).__call__
    monkeypatch.setattr(
        type(tokenizer),
        "__call__",
        lambda self, *args, **options: _without_encodings(call(self, *args, **options)),
    )
    got = [prompt_and_responses(p, ["4"], tokenizer) for p in ("2+2=", "1", "Say ", "")]
    assert got == wanted
    assert [found.is_merged for (found,) in got] == [False, False, True, False]


def _without_encodings(encoded):
    encoded._encodings = None
    return encoded


def test_an_answer_of_a_word_level_tokenizer_starts_a_new_word():
    tokenizer = tiny_tokenizer()
    for answer in ("w5 w6", " w5 w6"):
        (found,) = prompt_and_responses("w3 w4", [answer], tokenizer)
        assert found == ([3, 4, 5, 6, 1], 2, False)
