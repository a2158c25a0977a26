"""Records from two plain text files: sentences that people liked and sentences they did not.

Made for film-review sentences, where "positive" and "negative" are the labels; any two files with
one sentence a line will do. A policy learns to continue the first words of a review, a reward
model learns to prefer positive reviews, and a judge is fitted on sentences no stage ever sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

from rlhf_lightning.arguments import Fraction, PathOrName, Seed, checked
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    PromptRecord,
    Record,
    RecordKind,
    Split,
    TextRecord,
    check_split,
)
from rlhf_lightning.data.splits import split_fraction

Part = Literal["train", "validation", "classifier"]
PARTS: tuple[Part, ...] = ("train", "validation", "classifier")
PUBLIC_SOURCE = (
    "Pang and Lee's sentence polarity data (on the Hugging Face hub: "
    "cornell-movie-review-data/rotten_tomatoes), written as one sentence a line"
)
LENGTH_JITTER = 2.0


class Sentences(NamedTuple):
    """The sentences of one part, by label."""

    positive: tuple[str, ...]
    negative: tuple[str, ...]


@checked
@dataclass(frozen=True)
class LabelledTextSource:
    """Sentences of two labels as texts, openings, demonstrations and preference pairs.

    The sentences fall into three disjoint parts by a hash of sentence and seed, so adding
    sentences moves no other: `train`, `validation`, and `classifier`, which no record ever shows.
    Every record starts with `lead_in`, so that a whole sentence (a pair) and an opening with its
    continuation (a rollout) are token for token of one form.

    Args:
        positive: file of positive sentences, UTF-8, one a line.
        negative: file of negative sentences.
        seed: seeds the parts, the order and the pairs.
        validation_fraction: share of the sentences held out.
        classifier_fraction: share kept for a judge that evaluation fits.
        lead_in: what every text starts with; not empty, because a pair's prompt would be.
        opening_words: words of a review that a policy is given to continue.
        min_continuation_words: shorter reviews give no opening and no demonstration.
        pairs_per_sentence: preference pairs that each training sentence takes part in.

    Raises:
        ValueError: if a path is missing, there is no such file, a share or count is out of range,
            or `lead_in` is empty.

    Source: Pang and Lee 2005, "Seeing stars", for the data it was made for.
    """

    positive: PathOrName | None = None
    negative: PathOrName | None = None
    seed: Seed = 1
    validation_fraction: Fraction = 0.1
    classifier_fraction: Fraction = 0.4
    lead_in: str = "Review:"
    opening_words: int = 5
    min_continuation_words: int = 4
    pairs_per_sentence: int = 2

    def __post_init__(self) -> None:
        """Check the arguments, and that both files exist."""
        for name in ("positive", "negative"):
            _check_file(name, getattr(self, name))
        shares = (self.validation_fraction, self.classifier_fraction)
        if not (all(0 < share < 1 for share in shares) and sum(shares) < 1):
            raise ValueError(
                f"validation_fraction={shares[0]} and classifier_fraction={shares[1]} must be "
                "positive and leave something to train on: their sum must be below 1"
            )
        if not self.lead_in.strip():
            raise ValueError(
                "lead_in is empty: give the words that every text starts with, such as 'Review:'"
            )
        for name in ("opening_words", "min_continuation_words", "pairs_per_sentence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more")

    def records(self, kind: RecordKind, split: Split) -> list[Record]:
        """Return the records of a kind and split, in an order that is a function of the seed.

        * texts: every sentence.
        * demonstrations: opening -> rest of the sentence, of both labels.
        * prompts: the openings, each once; a held-out one is never in training too.
        * preferences: a positive sentence over a negative one of about its length.

        Raises:
            ValueError: if there is no such kind or split.
        """
        check_split(split)
        rng = Random(f"{self.seed}/{kind}/{split}")
        if kind == "preferences":
            return list(self._pairs(split, rng))
        part = self.sentences(split)
        sentences = [*part.positive, *part.negative]
        rng.shuffle(sentences)
        if kind == "texts":
            return [TextRecord(f"{self.lead_in} {sentence}") for sentence in sentences]
        demonstrations = [d for d in map(self._demonstration, sentences) if d is not None]
        if kind == "demonstrations":
            return list(demonstrations)
        if kind == "prompts":
            taken = self._train_openings if split == "validation" else frozenset[str]()
            openings = dict.fromkeys(str(d.prompt) for d in demonstrations)
            return [PromptRecord(opening) for opening in openings if opening not in taken]
        raise ValueError(
            f"kind={kind!r} is unknown: use 'texts', 'prompts', 'demonstrations' or 'preferences'"
        )

    def sentences(self, part: Part) -> Sentences:
        """Return the sentences of a part, in the order of the files, each once.

        Raises:
            ValueError: if there is no such part.
        """
        if part not in PARTS:
            raise ValueError(f"part={part!r} is unknown: use one of {', '.join(PARTS)}")
        return self._parts[part]

    @cached_property
    def _parts(self) -> dict[Part, Sentences]:
        files = [_read(Path(str(path)).expanduser()) for path in (self.positive, self.negative)]
        # A sentence with both labels says nothing about either.
        both = set(files[0]) & set(files[1])
        labels = [[s for s in sentences if s not in both] for sentences in files]
        parts: dict[Part, Sentences] = {}
        for part in PARTS:
            chosen = [tuple(s for s in label if self._part_of(s) == part) for label in labels]
            if not all(chosen):
                raise ValueError(
                    f"{self.positive} and {self.negative} have {len(labels[0])} and "
                    f"{len(labels[1])} sentences with one label, too few to leave some of both "
                    f"in part {part!r}: give more sentences, or another share or seed"
                )
            parts[part] = Sentences(*chosen)
        return parts

    def _part_of(self, sentence: str) -> Part:
        place = split_fraction(sentence, self.seed)
        if place < self.validation_fraction:
            return "validation"
        in_classifier = place < self.validation_fraction + self.classifier_fraction
        return "classifier" if in_classifier else "train"

    def _demonstration(self, sentence: str) -> DemonstrationRecord | None:
        words = sentence.split()
        if len(words) < self.opening_words + self.min_continuation_words:
            return None
        opening = " ".join(words[: self.opening_words])
        # The space belongs to the next word in BPE, so the completion has it.
        rest = " " + " ".join(words[self.opening_words :])
        return DemonstrationRecord(f"{self.lead_in} {opening}", rest)

    @cached_property
    def _train_openings(self) -> frozenset[str]:
        part = self.sentences("train")
        demonstrations = map(self._demonstration, (*part.positive, *part.negative))
        return frozenset(str(d.prompt) for d in demonstrations if d is not None)

    def _pairs(self, split: Split, rng: Random) -> list[PreferenceRecord]:
        part = self.sentences(split)
        # Held-out pairs share no sentence, so that their interval is that of independent draws.
        repeats = self.pairs_per_sentence if split == "train" else 1
        pairs: dict[tuple[str, str], None] = {}
        for _ in range(repeats):
            positive, negative = list(part.positive), list(part.negative)
            number = min(len(positive), len(negative))
            rng.shuffle(positive)
            rng.shuffle(negative)
            # Pairs of like length: else a reward model learns from the length, and rows pad more.
            positive = _by_length(positive[:number], rng)
            negative = _by_length(negative[:number], rng)
            pairs |= dict.fromkeys(zip(positive, negative, strict=True))
        records = [
            PreferenceRecord(self.lead_in, f" {chosen}", f" {rejected}")
            for chosen, rejected in pairs
        ]
        rng.shuffle(records)
        return records


def _by_length(sentences: Sequence[str], rng: Random) -> list[str]:
    """Return the sentences by number of words, slightly shuffled so that repeats give new pairs."""
    jitter = [rng.uniform(-LENGTH_JITTER, LENGTH_JITTER) for _ in sentences]
    keys = [len(s.split()) + noise for s, noise in zip(sentences, jitter, strict=True)]
    return [sentences[i] for i in sorted(range(len(sentences)), key=keys.__getitem__)]


def _check_file(name: str, path: str | Path | None) -> None:
    if path is None or not Path(path).expanduser().is_file():
        found = "no path was given" if path is None else "there is no such file"
        raise ValueError(
            f"{name}={path}: {found}. Give dataset.positive=FILE and dataset.negative=FILE, e.g. "
            f"of {PUBLIC_SOURCE}"
        )


def _read(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    # Not splitlines(): it also splits at characters that stand inside a sentence.
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return list(dict.fromkeys(line for line in lines if line))
