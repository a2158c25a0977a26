"""Accuracy on parts of the held-out pairs, where length alone cannot help."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhf_lightning.data.collate import PreferenceCollator
from rlhf_lightning.data.encode import EncodedPreference
from rlhf_lightning.evaluation.reward_accuracy import (
    ScoredPair,
    comparable_rows,
    pair_metrics,
    pair_values,
    score_pairs,
)
from rlhf_lightning.functional.statistics import wilson_interval
from rlhf_lightning.models.forward import sequence_scores
from tests.builders.models import EOS, PAD, VOCABULARY, tiny_scalar_model, tiny_tokenizer


def encoded_pairs(count=12, prompt_length=3):
    generator = np.random.default_rng(3)

    def answer():
        length = int(generator.integers(1, 20))
        return [*generator.integers(2, VOCABULARY, length).tolist(), EOS]

    answers = [answer() for _ in range(count)]
    prompt = list(range(2, 2 + prompt_length))
    return [
        EncodedPreference(
            np.array(prompt + answers[i], dtype=np.int32),
            np.array(prompt + answers[(i * 5 + 1) % count], dtype=np.int32),
            prompt_length,
            subsets=("odd",) if i % 2 else (),
            domain="ab"[i % 2],
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_scores_are_those_of_each_pair_alone_in_the_order_of_the_rows(batch_size):
    model, rows = tiny_scalar_model("llama"), encoded_pairs()
    scored = score_pairs(model, rows, batch_size=batch_size, pad_token_id=PAD)
    assert model.training
    for row, pair in zip(rows, scored, strict=True):
        batch = PreferenceCollator(PAD)([row])
        with torch.no_grad():
            chosen = sequence_scores(model, batch.chosen_input_ids, batch.chosen_attention_mask)
            rejected = sequence_scores(
                model, batch.rejected_input_ids, batch.rejected_attention_mask
            )
        torch.testing.assert_close(torch.tensor([pair.chosen]), chosen)
        torch.testing.assert_close(torch.tensor([pair.rejected]), rejected)
        assert pair.chosen_length == int(batch.chosen_length)
        assert pair.rejected_length == int(batch.rejected_length)
        assert (pair.subsets, pair.domain) == (row.subsets, row.domain)


def test_the_surest_mistakes_come_first_with_their_texts_and_what_is_stated_adds_up():
    tokenizer, rows = tiny_tokenizer(), encoded_pairs(4)
    gaps = (0.1, -3.0, 2.5, -0.2)
    values = pair_values([ScoredPair(gap, 0.0, 1, 1) for gap in gaps], rows, tokenizer)
    assert values["margin"] == list(gaps)
    assert [wrong["margin"] for wrong in values["wrong"]] == [-3.0, -0.2]
    text = tokenizer.decode(rows[1].rejected_input_ids[3:-1].tolist())
    assert values["wrong"][0]["rejected"].strip() == text.strip()
    assert tokenizer.decode(rows[1].chosen_input_ids[:3].tolist()) == values["wrong"][0]["prompt"]
    # Two pairs are stated below 60 %, of which one is right; two above 90 %, likewise.
    for (stated, right, low, high, count), odds in zip(
        values["reliability"], ((0.1, 0.2), (2.5, 3.0)), strict=True
    ):
        assert stated == pytest.approx(sum(1 / (1 + math.exp(-gap)) for gap in odds) / 2)
        assert (right, count) == (0.5, 2)
        assert (low, high) == pytest.approx(wilson_interval(1, 2, confidence=0.95))


PAIRS = [
    ScoredPair(1.0, 0.0, 100, 91, ("strict",), "a"),  # right, matched, longer
    ScoredPair(0.0, 1.0, 91, 100, ("strict",), "a"),  # wrong, matched, shorter
    ScoredPair(1.0, 0.0, 50, 100, ("strict",), "b"),  # right, shorter
    ScoredPair(0.5, 0.5, 100, 50, (), "b"),  # a tie is wrong, longer
    ScoredPair(2.0, 1.0, 10, 10, (), "b"),  # right, matched, of one length
]


def test_accuracy_is_measured_on_each_part_beside_its_number_of_pairs():
    measures = pair_metrics(PAIRS)
    expected = {
        "_length_matched": (2 / 3, 3),
        "_chosen_shorter": (1 / 2, 2),
        "_chosen_longer": (1 / 2, 2),
        "/subset/strict": (2 / 3, 3),
        "_length_matched/subset/strict": (1 / 2, 2),
        "_chosen_shorter/subset/strict": (1 / 2, 2),
        "_chosen_longer/subset/strict": (1.0, 1),
        "/domain/a": (1 / 2, 2),
        "/domain/b": (2 / 3, 3),
    }
    for part, (accuracy, number) in expected.items():
        assert measures[f"val/accuracy{part}"] == pytest.approx(accuracy), part
        assert measures[f"val/num_pairs{part}"] == number, part
    assert measures["val/longer_wins_accuracy/subset/strict"] == pytest.approx(1 / 3)
    low, high = wilson_interval(2, 3, confidence=0.95)
    assert measures["val/accuracy_low/subset/strict"] == pytest.approx(low)
    assert measures["val/accuracy_high/subset/strict"] == pytest.approx(high)


def test_pairs_of_one_prompt_do_not_narrow_the_intervals():
    rows = [*encoded_pairs(prompt_length=3), *encoded_pairs(prompt_length=4)]
    scored = score_pairs(tiny_scalar_model("llama"), rows, batch_size=5, pad_token_id=PAD)
    assert [pair.prompt for pair in scored] == [scored[0].prompt] * 12 + [scored[12].prompt] * 12
    assert scored[0].prompt != scored[12].prompt
    pairs = [pair._replace(domain="a", prompt=i % 5) for i, pair in enumerate(PAIRS * 20)]
    found = pair_metrics(pairs)
    low, high = wilson_interval(3, 5, confidence=0.95)  # five prompts, right or wrong throughout
    assert found["val/accuracy_low/domain/a"] < low < high < found["val/accuracy_high/domain/a"]
    reliable = pair_values(pairs, encoded_pairs(100), tiny_tokenizer())["reliability"]
    (_, _, low, high, count) = reliable[-1]
    assert count == 80  # of four prompts
    assert low < wilson_interval(3, 4, confidence=0.95)[0] < 0.75 < high


def test_overfitting_is_looked_for_on_training_pairs_like_the_held_out_ones():
    held_out = [replace(row, subsets=("odd",)) for row in encoded_pairs(2)]
    train = [replace(row, subsets=()) for row in encoded_pairs(10)]
    easy = [replace(row, subsets=("easy",)) for row in encoded_pairs(12)[10:]]
    found = comparable_rows([*train, *easy, *train], held_out, count=100)
    assert found == train, "each pair once, and none of a subset that is not held out"
    assert comparable_rows(train, held_out, count=5) == train[::2]
    assert comparable_rows(easy, held_out, count=5) == []
