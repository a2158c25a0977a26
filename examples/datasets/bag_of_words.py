"""A judge that shares nothing with the models it judges: naive Bayes on words and word pairs."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Self

from examples.datasets.labelled_text import LabelledTextSource
from rlhf_lightning.arguments import checked

WORD = re.compile(r"\w+(?:['\u2019-]\w+)*|[^\w\s]")

logger = logging.getLogger(__name__)


class BagOfWords:
    """Naive Bayes on the presence of words and of pairs of neighbouring words.

    The log-odds of a text are `sum over its features w of log P(w | positive) / P(w | negative)`
    with `P(w | c) = (texts of c with w + smoothing) / (features of c + smoothing * vocabulary)`,
    both classes equally likely; features never seen in fitting count nothing.

    Args:
        smoothing: pseudo-count of every feature in every class.

    Source: Wang and Manning 2012, "Baselines and bigrams", binarised multinomial naive Bayes.
    """

    def __init__(self, *, smoothing: float = 1.0) -> None:
        self.smoothing = smoothing
        self.weights: dict[str, float] = {}

    def fit(self, positive: Sequence[str], negative: Sequence[str]) -> Self:
        """Learn from texts of both classes; return the classifier."""
        both = (positive, negative)  # in how many texts of each class does a feature occur?
        counts = [Counter(f for text in texts for f in features(text)) for texts in both]
        vocabulary = counts[0].keys() | counts[1].keys()
        prior = self.smoothing * len(vocabulary)
        totals = [math.log(sum(count.values()) + prior) for count in counts]
        offset = totals[1] - totals[0]
        self.weights = {
            feature: math.log(
                (counts[0][feature] + self.smoothing) / (counts[1][feature] + self.smoothing)
            )
            + offset
            for feature in sorted(vocabulary)
        }
        return self

    def log_odds(self, texts: Sequence[str]) -> list[float]:
        """Return log P(positive) / P(negative) of each text, nats; 0 where nothing is known.

        Raises:
            RuntimeError: if `fit` was not called.
        """
        # fsum: the order of a set is no property of the text.
        return [math.fsum(self.weights.get(f, 0.0) for f in features(text)) for text in texts]

    def probability(self, texts: Sequence[str]) -> list[float]:
        """Return the probability that each text is positive; naive Bayes is too sure of itself."""
        return [1 / (1 + math.exp(-max(min(x, 500.0), -500.0))) for x in self.log_odds(texts)]

    def accuracy(self, positive: Sequence[str], negative: Sequence[str]) -> float:
        """Return the share of texts put into their class, each class weighing one half."""
        right_positive = sum(x > 0 for x in self.log_odds(positive)) / len(positive)
        right_negative = sum(x <= 0 for x in self.log_odds(negative)) / len(negative)
        return (right_positive + right_negative) / 2


def features(text: str) -> frozenset[str]:
    """Return the words and punctuation marks of a text in lower case, and their neighbour pairs."""
    words = WORD.findall(text.lower())
    pairs = (f"{first} {second}" for first, second in pairwise(words))
    return frozenset((*words, *pairs))


class SentimentGold:
    """Calls a continuation positive (1.0) or not (0.0); evaluation only, training never sees it.

    The mean over prompts is the share called positive. A tie counts one half in a win rate, so
    `win rate = 0.5 + (share of the policy - share of the baseline) / 2`: 25 points more are 0.625.

    Args:
        classifier: classifier fitted on sentences that no stage sees.
        accuracy: accuracy of the classifier on whole sentences that it was not fitted on.
    """

    def __init__(self, classifier: BagOfWords, accuracy: float) -> None:
        self.classifier = classifier
        self.accuracy = accuracy

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], finished: Sequence[bool]
    ) -> list[float]:
        """Return 1.0 for each completion called positive, else 0.0; the prompt is not judged."""
        return [float(x > 0) for x in self.classifier.log_odds(completions)]


@checked
def sentiment_gold(source: LabelledTextSource) -> SentimentGold:
    """Return the judge fitted on the classifier part of `source`, and log its accuracy.

    The source is the stages' own, so the judge's sentences are exactly those they do not see.
    """
    classifier = BagOfWords().fit(*source.sentences("classifier"))
    held_out = source.sentences("validation")
    accuracy = classifier.accuracy(*held_out)
    logger.info(
        "bag-of-words judge: fitted on %d sentences no stage sees, accuracy %.3f on %d held-out "
        "sentences",
        sum(map(len, source.sentences("classifier"))),
        accuracy,
        sum(map(len, held_out)),
    )
    return SentimentGold(classifier, accuracy)
