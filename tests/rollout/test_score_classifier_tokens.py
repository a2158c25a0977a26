"""What a classifier of another maker reads: one text or a pair, cut from the left of the prompt."""

from __future__ import annotations

import pytest

from rlhf_lightning.text.reward_text import ClassifierInputs, Completion, Renderer
from tests.builders.tokenizers import word_tokenizer

TURNS = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def plain(prompt, completion):
    return Completion(prompt, None, completion, True)


def classify(row, *, max_length=None, input_format="text", chat_template=None):
    tokenizer = word_tokenizer()
    tokenizer.chat_template = chat_template
    tokens = ClassifierInputs(Renderer(tokenizer), input_format, max_length)(row)
    return tokenizer.decode(tokens.ids), tokens.type_ids, tokens.over_long


@pytest.mark.parametrize(
    ("max_length", "text", "over_long"),
    [
        (7, "[CLS] w1 w2 w3 w4 w5 [SEP]", False),
        (6, "[CLS] w2 w3 w4 w5 [SEP]", False),
        (4, "[CLS] w4 w5 [SEP]", False),
        (3, "[CLS] w4 [SEP]", True),
    ],
)
def test_a_classifiers_text_is_cut_from_the_left_of_the_prompt(max_length, text, over_long):
    got, types, cut = classify(plain("w1 w2 w3 ", "w4 w5"), max_length=max_length)
    assert (got, cut) == (text, over_long)
    assert types == [0] * len(text.split())


@pytest.mark.parametrize(
    ("max_length", "text", "second", "over_long"),
    [
        (8, "[CLS] w1 w2 w3 [SEP] w4 w5 [SEP]", 3, False),
        (7, "[CLS] w2 w3 [SEP] w4 w5 [SEP]", 3, False),
        (5, "[CLS] [SEP] w4 w5 [SEP]", 3, False),
        (4, "[CLS] [SEP] w4 [SEP]", 2, True),
    ],
)
def test_of_a_pair_the_question_is_cut_from_the_left(max_length, text, second, over_long):
    row = plain("w1 w2 w3", "w4 w5")
    got, types, cut = classify(row, max_length=max_length, input_format="pair")
    assert (got, cut) == (text, over_long)
    assert types == [0] * (len(text.split()) - second) + [1] * second


def test_a_pair_of_a_conversation_has_its_turns_as_the_question():
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    row = Completion("", [*messages, {"role": "user", "content": "w3"}], "w4", True)
    got, types, _ = classify(row, input_format="pair", chat_template=TURNS)
    assert got == "[CLS] w1 w2 w3 [SEP] w4 [SEP]"
    assert sum(types) == 2
