"""Records of the built-in world, made from a seed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Annotated, Any, get_args

from pydantic import Field

from rlhf_lightning.arguments import Count, Seed, Share, checked
from rlhf_lightning.data.demo.annotators import PANEL, SimulatedAnnotator
from rlhf_lightning.data.demo.answers import (
    Quality,
    sample_response,
    sample_style,
    sample_wrong_core,
    write_response,
)
from rlhf_lightning.data.demo.gold import gold_parts
from rlhf_lightning.data.demo.grammar import REMARKS, right_core
from rlhf_lightning.data.demo.questions import DOMAINS, Question, all_questions
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    PromptRecord,
    Record,
    RecordKind,
    Split,
    TextRecord,
    both_responses,
    check_split,
)

TEXT_QUALITY = Quality(
    right=0.62, unknown=0.08, refusal=0.04, polite=0.15, rude=0.3, careless=0.2,
    fillers=(0.4, 0.3, 0.3), corrupted=0.05,
)  # fmt: skip
DEMONSTRATION_QUALITY = Quality(
    right=0.68, unknown=0.05, refusal=0.02, polite=0.44, rude=0.08, careless=0.4,
    fillers=(0.65, 0.27, 0.08), corrupted=0.0,
)  # fmt: skip
PREFERENCE_QUALITY = Quality(
    right=0.6, unknown=0.06, refusal=0.03, polite=0.45, rude=0.08, careless=0.4,
    fillers=(0.7, 0.22, 0.08), corrupted=0.03,
)  # fmt: skip

# Annotators are not asked about every near tie: this share of those below the gap is left out.
CLEAR_GAP = 1.0
NEAR_TIE_SKIPPED = 0.8

CONTRAST = "contrast"  # subset of the training pairs that are easier than held-out ones

# Of each domain, so that no domain is most of the prompts.
MOST_PROMPTS: Mapping[Split, int] = {"train": 700, "validation": 120}


@checked
@dataclass(frozen=True)
class DemoSource:
    """The built-in world as a source of records; everything is a function of the fields.

    Args:
        seed: seeds the split, every record and the annotators.
        num_texts: unlabelled texts to train a base model on.
        num_demonstrations: demonstrations for supervised fine-tuning.
        num_preferences: pairs to train a reward model on. Records cost next to nothing, so the
            counts are meant for one pass: fresh records teach more than repeated ones.
        num_validation_texts: texts on held-out prompts.
        num_validation_demonstrations: demonstrations on held-out prompts.
        num_validation_preferences: pairs on held-out prompts.
        held_out_fraction: held-out share of the combinations of a template and its words.
        contrast_fraction: share of the training pairs in which one core is right and one is wrong
            within the same style. Without them a reward model learns style long before facts.
        remark_fraction: share of the texts that end with a reader's true remark on whether they are
            right.
        panel: annotators that are simulated.
    """

    seed: Seed = 1
    num_texts: Count = 30000
    num_demonstrations: Count = 16000
    num_preferences: Count = 24000
    num_validation_texts: Count = 800
    num_validation_demonstrations: Count = 800
    num_validation_preferences: Count = 2000
    held_out_fraction: Annotated[float, Field(gt=0, lt=0.5)] = 0.15
    contrast_fraction: Share = 0.5
    remark_fraction: Share = 0.7
    panel: Annotated[tuple[SimulatedAnnotator, ...], Field(min_length=1)] = PANEL

    def records(self, kind: RecordKind, split: Split) -> list[Record]:
        """Return the records of a kind and split, the same at every call.

        Prompts are unique; the other kinds draw from them, every domain equally often.

        Raises:
            ValueError: if there is no such kind or split.
        """
        check_split(split)
        rng = Random(f"{self.seed}/{kind}/{split}")
        train = split == "train"
        match kind:
            case "prompts":
                return [PromptRecord(q.prompt, q.domain) for q in self.questions(split)]
            case "texts":
                count = self.num_texts if train else self.num_validation_texts
                return [self._text(q, rng) for q in self._draw(split, count, rng)]
            case "demonstrations":
                count = self.num_demonstrations if train else self.num_validation_demonstrations
                return [_demonstration(q, rng) for q in self._draw(split, count, rng)]
            case "preferences":
                return [pair for pair, _ in self._pairs(split)]
            case "unpaired":
                return [one for pair, _ in self._pairs(split) for one in both_responses(pair)]
        raise ValueError(f"kind={kind!r} is unknown: use one of {', '.join(get_args(RecordKind))}")

    def questions(self, split: Split) -> list[Question]:
        """Return the questions of a split, in a fixed shuffled order."""
        return self._split[split]

    def label_ceiling(self) -> float:
        """Return the expected accuracy, on the validation pairs, of ranking them by gold.

        It is the mean over these pairs of the probability, known exactly, that the pair's annotator
        prefers the response with the higher gold reward (no pair is tied in gold). The labels are
        one draw from these probabilities.
        """
        pairs = self._pairs("validation")
        return sum(agreement for _, agreement in pairs) / len(pairs)

    @cached_property
    def _split(self) -> Mapping[Split, list[Question]]:
        rng = Random(f"{self.seed}/split")
        questions = list(all_questions())
        combinations = sorted({question.combination for question in questions})
        rng.shuffle(combinations)
        held_out = set(combinations[: round(self.held_out_fraction * len(combinations))])
        seen: set[Any] = set()
        for question in questions:
            if question.combination not in held_out:
                seen.update(question.facts)
        # A fact that training never shows would be unknowable: its questions go to training.
        train = [
            q for q in questions if q.combination not in held_out or not seen.issuperset(q.facts)
        ]
        kept = {question.combination for question in train}
        validation = [question for question in questions if question.combination not in kept]
        rng.shuffle(train)
        rng.shuffle(validation)
        found: dict[Split, list[Question]] = {"train": train, "validation": validation}
        return {split: _at_most(MOST_PROMPTS[split], asked) for split, asked in found.items()}

    def _draw(self, split: Split, count: int, rng: Random) -> list[Question]:
        """Return `count` questions, every domain equally often up to one."""
        by_domain: dict[str, list[Question]] = {domain: [] for domain in DOMAINS}
        for question in self.questions(split):
            by_domain[question.domain].append(question)
        drawn = [rng.choice(by_domain[DOMAINS[index % len(DOMAINS)]]) for index in range(count)]
        rng.shuffle(drawn)
        return drawn

    def _text(self, question: Question, rng: Random) -> TextRecord:
        text = sample_response(question, TEXT_QUALITY, rng)
        if rng.random() < self.remark_fraction:
            right = gold_parts(question.prompt, text, True).correct
            text = f"{text} {REMARKS[0 if right else 1]} ."
        return TextRecord(f"{question.prompt} {text}", question.domain)

    def _pairs(self, split: Split) -> list[tuple[PreferenceRecord, float]]:
        """Return pairs, each with the probability that its annotator prefers the better one."""
        rng = Random(f"{self.seed}/preferences/{split}")
        train = split == "train"
        count = self.num_preferences if train else self.num_validation_preferences
        contrast = self.contrast_fraction if train else 0.0
        asked = self._draw(split, count, rng)
        return [_sample_pair(question, contrast, self.panel, rng) for question in asked]


def _at_most(count: int, questions: Sequence[Question]) -> list[Question]:
    """Return the first `count` questions of each domain."""
    numbers = {domain: itertools.count() for domain in DOMAINS}
    return [question for question in questions if next(numbers[question.domain]) < count]


def _demonstration(question: Question, rng: Random) -> DemonstrationRecord:
    answer = sample_response(question, DEMONSTRATION_QUALITY, rng)
    return DemonstrationRecord(question.prompt, answer, question.domain)


def _sample_pair(
    question: Question, contrast: float, panel: Sequence[SimulatedAnnotator], rng: Random
) -> tuple[PreferenceRecord, float]:
    while True:
        first, second, contrasted = _two_responses(question, contrast, rng)
        gold = [gold_parts(question.prompt, answer, True).total for answer in (first, second)]
        gap = abs(gold[0] - gold[1])
        if gap >= CLEAR_GAP or (gap > 0 and rng.random() >= NEAR_TIE_SKIPPED):
            break
    annotator = rng.choice(panel)
    length_gap = len(first.split()) - len(second.split())
    probability = annotator.prefers_first(gold[0] - gold[1], length_gap)
    agreement = probability if gold[0] > gold[1] else 1.0 - probability
    if rng.random() >= probability:
        first, second = second, first
    subsets = (CONTRAST,) if contrasted else ()
    record = PreferenceRecord(question.prompt, first, second, question.domain, subsets=subsets)
    return record, agreement


def _two_responses(question: Question, contrast: float, rng: Random) -> tuple[str, str, bool]:
    quality = PREFERENCE_QUALITY
    if rng.random() >= contrast:
        first = sample_response(question, quality, rng)
        return first, sample_response(question, quality, rng), False
    style = sample_style(quality, rng.random() < quality.right, rng)
    right = write_response(right_core(question, rng), style, rng)
    wrong = write_response(sample_wrong_core(question, quality, rng), style, rng)
    return (right, wrong, True) if rng.random() < 0.5 else (wrong, right, True)
