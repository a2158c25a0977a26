"""The world's tokenizer knows every word that the world can say."""

from __future__ import annotations

import pytest

from rlhf_lightning.data.demo.grammar import I_DO_NOT_KNOW
from rlhf_lightning.data.demo.questions import all_questions
from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.data.demo.vocabulary import demo_tokenizer


def texts_of(source: DemoSource) -> list[str]:
    texts = [question.prompt for question in all_questions()]
    for split in ("train", "validation"):
        texts += [record.text for record in source.records("texts", split)]
        for record in source.records("demonstrations", split):
            texts.append(record.completion)
        for record in source.records("preferences", split):
            texts += [record.chosen, record.rejected]
    return texts


@pytest.mark.thorough
def test_every_text_of_the_world_comes_back_from_its_ids() -> None:
    tokenizer = demo_tokenizer()
    source = DemoSource(1, num_texts=1500, num_demonstrations=500, num_preferences=1000)
    texts = [*texts_of(source), I_DO_NOT_KNOW]
    assert all(text.isascii() and text == text.lower() for text in texts)
    ids = tokenizer(texts).input_ids
    assert tokenizer.batch_decode(ids) == texts
    assert [len(row) for row in ids] == [len(text.split()) for text in texts]
    assert not any(tokenizer.unk_token_id in row for row in ids)


def test_special_tokens_are_dropped_on_decoding_and_unknown_words_are_marked() -> None:
    tokenizer = demo_tokenizer()
    ids = tokenizer("it is 5 .").input_ids
    assert tokenizer.decode([0, 0, *ids, 1], skip_special_tokens=True) == "it is 5 ."
    assert tokenizer("it is zebra .").input_ids[2] == tokenizer.unk_token_id
    assert tokenizer("It IS 5 .").input_ids == ids
