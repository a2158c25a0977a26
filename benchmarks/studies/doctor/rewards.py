"""Reward functions of the study `doctor`; the data are below the folder `RLHF_DATA`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from examples.datasets.bag_of_words import BagOfWords
from examples.datasets.labelled_text import LabelledTextSource

LIST_ITEM = re.compile(r"^\s*(?:[-*\u2022]|\d+[.)])\s", re.MULTILINE)


def data_folder() -> Path:
    """Return the folder of the public data sets.

    Raises:
        ValueError: if `RLHF_DATA` is not set.
    """
    folder = os.environ.get("RLHF_DATA")
    if not folder:
        raise ValueError(
            "RLHF_DATA is not set: export RLHF_DATA=FOLDER with sentence_polarity/ in it"
        )
    return Path(folder)


def reviews() -> LabelledTextSource:
    """Return the film reviews, split as the stages split them."""
    folder = data_folder() / "sentence_polarity"
    return LabelledTextSource(folder / "pos.txt", folder / "neg.txt")


@cache
def _words() -> BagOfWords:
    part = reviews().sentences("train")  # the gold judge is fitted on sentences that are not here
    return BagOfWords().fit(part.positive, part.negative)


def bag_of_words(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Return a quarter of the log-odds of "positive" by naive Bayes on words: unbounded."""
    return [x / 4 for x in _words().log_odds(completions)]


def likes_lists(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Return half a point for each list item, up to four, and up to one for the length."""
    return [
        0.5 * min(len(LIST_ITEM.findall(text)), 4) + min(len(text.split()), 40) / 40
        for text in completions
    ]
