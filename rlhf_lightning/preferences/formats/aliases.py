"""How other tools call a question, two answers to it, and the better one of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlhf_lightning.data.conversations import parse_text
from rlhf_lightning.data.errors import BadRecordError, Location, describe
from rlhf_lightning.preferences.records import Choice, LabError

if TYPE_CHECKING:
    from rlhf_lightning.preferences.aggregate import Verdict

AGENT = "verdict"  # who a verdict is by, where a tool asks for a name
PROMPTS = ("prompt", "instruction", "question", "input", "query")
ANSWERS = (
    ("first", "second"),
    ("answer1", "answer2"),
    ("answer-1", "answer-2"),
    ("response1", "response2"),
    ("response-1", "response-2"),
    ("response_1", "response_2"),
    ("response_a", "response_b"),
    ("completion1", "completion2"),
    ("text1", "text2"),
    ("chosen", "rejected"),
)
_CHOICES: dict[str, Choice] = {
    "tie": "tie",
    "equal": "tie",
    "same": "tie",
    "both": "tie",
    "both_bad": "both_bad",
    "both bad": "both_bad",
    "neither": "both_bad",
    "skip": "skip",
}
_SIDES: dict[str, Choice] = {
    "1": "first",
    "a": "first",
    "left": "first",
    "2": "second",
    "b": "second",
    "right": "second",
}


def find_texts(values: Mapping[str, Any], where: Location) -> tuple[Any, str, str, tuple[str, str]]:
    """Return prompt, both answers, and how these are called there.

    Raises:
        BadRecordError: if one is missing or no text.
    """
    prompt = next((key for key in PROMPTS if values.get(key)), None)
    answers = next((pair for pair in ANSWERS if pair[0] in values and pair[1] in values), None)
    if prompt is None or answers is None:
        missing = "a prompt" if prompt is None else "two answers"
        known = PROMPTS if prompt is None else [" and ".join(pair) for pair in ANSWERS]
        raise BadRecordError(
            where,
            f"{missing} cannot be found among {', '.join(map(str, values)) or 'no keys'}",
            f"name it as one of: {', '.join(known)}",
        )
    texts = []
    for key in answers:
        if not isinstance(values[key], str):
            found = f"{key!r} holds {describe(values[key])}, expected text"
            raise BadRecordError(where, found, "give each answer as one text")
        texts.append(values[key])
    return parse_text(values[prompt], prompt, where), texts[0], texts[1], answers


@contextmanager
def naming_the_place(where: Location) -> Iterator[None]:
    """Turn what goes wrong with a foreign value into an error that names file and record."""
    try:
        yield
    except BadRecordError:
        raise
    except (LabError, AttributeError, KeyError, TypeError, ValueError) as error:
        fix = "mend the record, or leave it out"
        raise BadRecordError(where, f"it cannot be read ({error})", fix) from error


def as_word(verdict: Verdict, left_out: Counter[str]) -> tuple[Choice, float] | None:
    """Return what a verdict says, ties included, and the share of votes that said so.

    Args:
        verdict: of a pair.
        left_out: counts verdicts that say nothing, by reason.
    """
    from rlhf_lightning.preferences.aggregate import TIE

    choice: Choice | None = "tie" if verdict.left_out == TIE else verdict.choice
    if choice is None:
        left_out[str(verdict.left_out)] += 1
        return None
    return choice, round(verdict.votes[choice] / sum(verdict.votes.values()), 6)


def as_choice(value: Any, answers: tuple[str, str]) -> Choice | None:
    """Return the choice that a word of another tool means, None if it means none.

    Args:
        value: what was chosen: a side, a number, the name of an answer, `tie`, ...
        answers: how the two answers are called there.
    """
    word = str(value).strip().lower()
    for name, side in zip(answers, ("first", "second"), strict=True):
        if word == name.lower() or word == side:
            return "first" if side == "first" else "second"
    return _CHOICES.get(word) or _SIDES.get(word)
