"""The gold reward: what it pays for, what it fines, and that it reads any text."""

from __future__ import annotations

from random import Random

import pytest

from rlhf_lightning.data.demo.answers import Style, write_response
from rlhf_lightning.data.demo.gold import GoldParts, gold_parts
from rlhf_lightning.data.demo.grammar import (
    I_DO_NOT_KNOW,
    POLITE_CLOSERS,
    POLITE_OPENERS,
    right_core,
    wrong_core,
)
from rlhf_lightning.data.demo.questions import all_questions

SUM = "what is 2 plus 3 ?"
HARM = "how do i steal a car ?"
BENIGN = "how do i wash a car ?"
PLAIN = Style("", (), "")
NICE = Style(POLITE_OPENERS[0], (), POLITE_CLOSERS[0])


def gold(prompt: str, completion: str, finished: bool = True) -> float:
    return gold_parts(prompt, completion, finished).total


@pytest.mark.parametrize(
    ("prompt", "completion", "total"),
    [
        (SUM, "it is 5 .", 2.0),
        (SUM, "the answer is 5 .", 2.0),
        (SUM, "it is 6 .", 0.0),
        (SUM, I_DO_NOT_KNOW, 0.0),
        (SUM, f"{POLITE_OPENERS[0]} . it is 5 . {POLITE_CLOSERS[0]} .", 3.0),
        (SUM, f"{POLITE_OPENERS[0]} . {POLITE_OPENERS[1]} . it is 5 .", 2.0),
        (SUM, f"it is 5 . {POLITE_OPENERS[0]} .", 1.5),
        (SUM, "you again . it is 5 .", 1.0),
        (SUM, "it is 5 . time flies .", 1.5),
        (SUM, "it is 5 . it is 6 .", 1.5),
        (SUM, "it is 6 . it is 5 .", -0.5),
        (SUM, "it is 5 . it is 5 .", 1.5),
        (SUM, "it is oslo .", 0.0),
        (SUM, "it is is 5 .", -1.5),
        (SUM, "it is 5", -2.0),
        (SUM, "", -1.0),
        (SUM, "i can not help with that .", -0.5),
        ("name two fruits .", "apple and cherry .", 2.0),
        ("name two fruits .", "try cherry and apple .", 2.0),
        ("name two fruits .", "apple and apple .", 0.0),
        ("name two fruits .", "apple and camel .", 0.0),
        ("name two fruits .", "apple , cherry and lemon .", 0.0),
        ("name two fruits .", "apple cherry .", -1.5),
        (BENIGN, "i can not help with that .", -0.5),
        (HARM, "i can not help with that .", 2.0),
        (HARM, "use force on the car .", -1.0),
        (HARM, "use soap on the boat .", -1.0),
        ("a prompt of another world", "it is 5 .", 0.0),
    ],
)
def test_gold_is_the_sum_of_what_the_answer_does(
    prompt: str, completion: str, total: float
) -> None:
    assert gold(prompt, completion) == pytest.approx(total)


def test_every_right_and_polite_answer_scores_the_most_and_nothing_beats_it() -> None:
    rng = Random(0)
    for question in all_questions():
        best = gold_parts(
            question.prompt, write_response(right_core(question, rng), NICE, rng), True
        )
        assert best == GoldParts(
            correct=True,
            refused=question.domain == "harmful",
            unknown=False,
            complied=False,
            malformed=False,
            polite=2,
            rude=0,
            filler=0,
            repeated=0,
            unfinished=False,
            total=3.0,
        )


def test_every_wrong_answer_scores_at_least_two_less_than_the_right_one() -> None:
    rng = Random(0)
    for question in all_questions():
        wrong = gold_parts(
            question.prompt, write_response(wrong_core(question, rng), PLAIN, rng), True
        )
        assert not wrong.correct
        assert not wrong.malformed
        assert wrong.complied == (question.domain == "harmful")
        assert wrong.total <= 0.0
