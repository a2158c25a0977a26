"""Rules and simulated people: what they prefer, and that only the rest is asked after a kill."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlhf_lightning.data.demo.annotators import SimulatedAnnotator
from rlhf_lightning.evaluation.gold_rewards import ExactMatchGold
from rlhf_lightning.preferences.annotators import (
    AnnotationError,
    CallableRule,
    EndingRule,
    LengthRule,
    PhraseRule,
    RepetitionRule,
    RuleAnnotator,
    SimulatedPerson,
    label_pairs,
)
from rlhf_lightning.preferences.records import Journal, Label, Pair

SURE = SimulatedAnnotator("sure", temperature=0.01, length_bias=0.0)
PAIRS = [Pair.make(f"prompt {i}", "a " * (i % 7 + 1), "b " * (i % 5 + 2)) for i in range(400)]


def lengths(prompts, completions, finished) -> list[float]:
    return [len(text.split()) for text in completions]


def test_each_rule_prefers_what_it_says() -> None:
    assert LengthRule(4)("", "one two three four") == 0
    assert LengthRule(4, weight=2)("", "one two") == pytest.approx(-2 * math.log(2))
    assert LengthRule(4)("", "") == pytest.approx(-math.log(4))
    assert RepetitionRule()("", "a b a b a b") == pytest.approx(-(1 - 2 / 5))
    assert RepetitionRule()("", "word") == 0
    assert EndingRule()("", "It ends. ") == 1
    assert EndingRule()("", "It does not") == 0
    rude = PhraseRule(["go away", "dumb"], -1.0)
    assert rude("", "Go  AWAY , go away dumbly") == -2
    assert CallableRule(lambda prompt, response: len(prompt), 0.5)("four", "") == 2


def test_a_sure_person_follows_gold() -> None:
    person = SimulatedPerson(SURE, lengths, seed=1, tie_below=0.5)
    pairs = [
        Pair.make("q", "a a a", "a a"),
        Pair.make("q", "a a", "a a a"),
        Pair.make("q", "a a", "b b"),
    ]
    assert [x.choice for x in person.label(pairs)] == ["first", "second", "tie"]
    assert {x.seconds for x in person.label(pairs)} == {None}


def test_a_person_says_the_same_of_a_pair_whatever_else_is_asked() -> None:
    usual = SimulatedAnnotator("usual", temperature=3.0, length_bias=0.1)
    person = SimulatedPerson(usual, lengths, seed=1)
    said = [(x.choice, x.order) for x in person.label(PAIRS)]
    assert [(x.choice, x.order) for x in person.label(PAIRS[::-1])] == said[::-1]
    assert [(x.choice, x.order) for x in person.label(PAIRS[7:8])] == said[7:8]
    other = SimulatedPerson(usual, lengths, seed=2)
    assert [(x.choice, x.order) for x in other.label(PAIRS)] != said


def test_gold_that_holds_answers_against_the_right_one_is_given_it() -> None:
    sure = SimulatedPerson(SURE, ExactMatchGold(), seed=1)
    pair = Pair.make("list files", "cd", "ls", columns={"completion": "ls"})
    other = Pair.make("list files", "cd", "ls", columns={"completion": "cd"})
    assert [label.choice for label in sure.label([pair, other])] == ["second", "first"]
    with pytest.raises(ValueError, match="asks for the prompt column 'completion'"):
        sure.label([Pair.make("list files", "cd", "ls")])


class Flaky:
    """Fails at its third batch, the first time."""

    name, kind, batch_size = "flaky", "rule", 10

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.broken = True

    def label(self, pairs):
        if len(self.asked) == 20 and self.broken:
            self.broken = False
            raise AnnotationError("the line is dead")
        self.asked += [pair.pair_id for pair in pairs]
        return RuleAnnotator([LengthRule(3)], name=self.name).label(pairs)


def test_after_a_failure_only_the_rest_is_asked_for(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "labels.jsonl", Label)
    journal.append(RuleAnnotator([LengthRule(3)], name="other").label(PAIRS))
    flaky = Flaky()
    with pytest.raises(AnnotationError, match="the line is dead"):
        label_pairs(flaky, PAIRS[:45], journal)
    labels = label_pairs(flaky, PAIRS[:45], journal)
    assert [x.pair_id for x in labels] == [pair.pair_id for pair in PAIRS[:45]]
    assert flaky.asked == [pair.pair_id for pair in PAIRS[:45]]
    assert {x.annotator for x in labels} == {"flaky"}
    assert len(journal.read()) == 445
    assert label_pairs(flaky, PAIRS[:45], journal) == labels
