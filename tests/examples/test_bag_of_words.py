"""The bag-of-words judge: its formula, and what it leans on."""

from __future__ import annotations

import math

import pytest

from examples.datasets.bag_of_words import BagOfWords, SentimentGold, features, sentiment_gold
from examples.datasets.labelled_text import LabelledTextSource

LIKED = ("a warm and funny tale", "warm , sharp and well played", "a funny cast makes it sing")
LOATHED = ("a cold and tired tale", "cold , dull and badly played", "a tired cast makes it sink")


def test_log_odds_are_those_worked_out_by_hand():
    # Features: "good", "film", "good film" against "bad", "film", "bad film"; five in all.
    classifier = BagOfWords(smoothing=1.0).fit(["good film"], ["bad film"])
    two, one, total = 2, 1, 3 + 5
    expected = math.log((two / total) / (one / total))
    log_odds = classifier.log_odds(["good", "bad", "film", "good film", "unknown words", ""])
    assert log_odds == pytest.approx([expected, -expected, 0, 2 * expected, 0, 0], abs=1e-12)


def test_the_judge_reads_the_continuation_and_not_the_prompt():
    classifier = BagOfWords().fit(LIKED, LOATHED)
    assert classifier.accuracy(["a warm cast", "funny"], ["a cold cast", "dull"]) == 1.0
    gold = SentimentGold(classifier, 1.0)
    prompts = ["cold and tired", "warm and funny"]
    assert gold(prompts, [" warm and funny", " cold and tired"], [True, False]) == [1.0, 0.0]


def test_the_judge_is_fitted_on_the_classifier_part_alone(tmp_path):
    for name, words in (("pos", ("warm", "funny")), ("neg", ("cold", "tired"))):
        lines = (f"scene {i} is {words[i % 2]}" for i in range(80))
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    source = LabelledTextSource(tmp_path / "pos", tmp_path / "neg")
    gold = sentiment_gold(source)
    parts = source.sentences("classifier")
    known = {feature for label in parts for text in label for feature in features(text)}
    assert set(gold.classifier.weights) == known
    assert gold.accuracy == 1.0
