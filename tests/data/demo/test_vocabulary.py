"""The world's tokenizer knows every word that the world can say."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from transformers import AutoTokenizer

from rlhf_lightning.data.demo.grammar import I_DO_NOT_KNOW, parse_core
from rlhf_lightning.data.demo.questions import all_questions
from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.data.demo.vocabulary import demo_tokenizer, world_words


def texts_of(source: DemoSource) -> list[str]:
    texts = [question.prompt for question in all_questions()]
    for split in ("train", "validation"):
        texts += [record.text for record in source.records("texts", split)]
        for record in source.records("demonstrations", split):
            texts.append(record.completion)
        for record in source.records("preferences", split):
            texts += [record.chosen, record.rejected]
    return texts


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_text_of_the_world_comes_back_from_its_ids(seed: int) -> None:
    tokenizer = demo_tokenizer()
    source = DemoSource(seed, num_texts=1500, num_demonstrations=500, num_preferences=1000)
    texts = [*texts_of(source), I_DO_NOT_KNOW]
    assert all(text.isascii() and text == text.lower() for text in texts)
    ids = tokenizer(texts).input_ids
    assert tokenizer.batch_decode(ids) == texts
    assert [len(row) for row in ids] == [len(text.split()) for text in texts]
    assert not any(tokenizer.unk_token_id in row for row in ids)


def test_the_vocabulary_is_small_and_has_three_special_tokens_of_its_own() -> None:
    tokenizer = demo_tokenizer()
    assert 300 <= len(tokenizer) <= 800
    assert len(tokenizer) == len(world_words()) + 3
    assert [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id] == [0, 1, 2]
    assert tokenizer.bos_token_id is None
    assert tokenizer.padding_side == "left"


def test_special_tokens_are_dropped_on_decoding_and_unknown_words_are_marked() -> None:
    tokenizer = demo_tokenizer()
    ids = tokenizer("it is 5 .").input_ids
    assert tokenizer.decode([0, 0, *ids, 1], skip_special_tokens=True) == "it is 5 ."
    assert tokenizer("it is zebra .").input_ids[2] == tokenizer.unk_token_id
    assert tokenizer("It IS 5 .").input_ids == ids


def test_a_saved_tokenizer_comes_back_the_same(tmp_path: Path) -> None:
    tokenizer = demo_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.padding_side == "left"
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    batch = ["what is 2 plus 3 ?", "hi , i am anna ."]
    for texts in (batch, Random(0).sample([q.prompt for q in all_questions()], 50)):
        assert loaded(texts, padding=True).input_ids == tokenizer(texts, padding=True).input_ids
        assert loaded.batch_decode(loaded(texts).input_ids) == texts


def test_every_list_of_words_is_parsed_as_what_it_says_or_as_nothing() -> None:
    assert parse_core(("apple", ",", "cherry", "and", "lemon")).values == (
        "apple",
        "cherry",
        "lemon",
    )
    assert parse_core(("tea",)).kind == "list"
    assert parse_core(("it", "is", "oslo")).kind == "answer"
    for words in ((), ("it",), ("apple", "cherry"), ("apple", "and"), ("hello", "oslo")):
        assert parse_core(words) is None
