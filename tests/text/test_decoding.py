"""Responses as text: behind their prompt, with their first space and their special tokens."""

from __future__ import annotations

import itertools

import pytest

from rlhf_lightning.text.decode import response_texts
from rlhf_lightning.text.tokens import prompt_and_responses
from tests.builders.models import tiny_tokenizer
from tests.builders.tokenizers import family_tokenizer
from tests.text.test_boundaries import ANSWERS, KINDS, PROMPTS, made


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_encoded_behind_a_prompt_is_decoded_as_it_was(kind, bos):
    tokenizer = made(kind, bos=bos)
    for prompt, answer in itertools.product(PROMPTS, ANSWERS):
        (found,) = prompt_and_responses(prompt, [answer], tokenizer)
        unknown = tokenizer.unk_token_id in found.prompt + found.response
        # Neither tells a text that starts with a space, nor RoBERTa a token that does.
        silent = (not prompt and answer[:1] == " ") or ("RoBERTa" in kind and prompt[-1:] == " ")
        if found.is_merged or unknown or silent or kind == "word pieces":
            continue
        got = response_texts([found.prompt], [found.response[:-1]], tokenizer)
        assert got == [answer] or kind == "unigram", (prompt, answer)
        assert got[0].split() == answer.split()


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_spaces_stay_where_a_tokenizer_would_clean_them_up(kind):
    tokenizer = family_tokenizer("gemma", kind)
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    prompt, answer = "if a != b ,", " x != y . do not"
    ids = tokenizer(prompt + answer, add_special_tokens=False).input_ids
    at = len(tokenizer(prompt, add_special_tokens=False).input_ids)
    assert response_texts([ids[:at]], [ids[at:]], tokenizer) == [answer]


@pytest.mark.parametrize("kind", ["prepend", "metaspace first", "byte level"])
def test_special_tokens_stay_unless_they_are_asked_to_be_skipped(kind):
    tokenizer = made(kind)
    prompt, x = tokenizer("2+2=", add_special_tokens=False).input_ids, tokenizer.vocab["<x>"]
    four = tokenizer("2+2= 4", add_special_tokens=False).input_ids[len(prompt) :]
    responses = [[x, *four], four]
    assert response_texts([prompt] * 2, responses, tokenizer) == ["<x> 4", " 4"]
    skipped = response_texts([prompt] * 2, responses, tokenizer, skip_special_tokens=True)
    assert skipped == [" 4", " 4"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_behind_a_control_token_has_no_space_that_the_tokenizer_put_there(kind):
    tokenizer = made(kind, template="x", rstrip=True)
    ids = tokenizer("Say<x>4", add_special_tokens=False).input_ids
    at = ids.index(tokenizer.vocab["<x>"]) + 1
    assert response_texts([ids[:at]], [ids[at:]], tokenizer) == ["4"]


@pytest.mark.parametrize("kind", ["prepend", "byte level"])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_the_prompt_begins_belongs_to_the_response(kind, cut):
    tokenizer = made(kind)
    ids = tokenizer("Say 👩本", add_special_tokens=False).input_ids
    pieces = len(tokenizer("Say ", add_special_tokens=False).input_ids)
    assert response_texts([ids[: pieces + cut]], [ids[pieces + cut :]], tokenizer) == ["👩本"]


def test_a_long_run_of_bytes_is_decoded_from_its_start():
    tokenizer = made("prepend")
    text = "x" + "本" * 30
    ids = tokenizer(text + "本", add_special_tokens=False).input_ids
    assert response_texts([ids[:-3]], [ids[-3:]], tokenizer) == ["本"]


def test_words_of_a_word_level_tokenizer_are_decoded_alone():
    assert response_texts([[3, 4]], [[5, 6]], tiny_tokenizer()) == ["w5 w6"]
