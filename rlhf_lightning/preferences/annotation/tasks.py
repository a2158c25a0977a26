"""What a rater sees and answers: about the left and the right of a screen, not about a pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from rlhf_lightning.preferences.records import Choice, Label, Pair, Side

Answer = Literal["left", "right", "tie", "both_bad", "skip"]
ANSWERS: tuple[Answer, ...] = ("left", "right", "tie", "both_bad", "skip")
Outcome = Literal["kept", "repeated", "differs", "undone", "gone"]


@dataclass(frozen=True)
class Task:
    """A pair that is shown to one rater.

    Args:
        assignment_id: to be given back with the label.
        pair: the pair.
        shown_first: which answer of the pair stands on the left.
        served: when, in seconds since 1970.
        before: the label that was taken back for it, if one was.
    """

    assignment_id: int
    pair: Pair
    shown_first: Side
    served: float
    before: Label | None = None


@dataclass(frozen=True)
class Progress:
    """How far everybody and one rater have come.

    Args:
        wanted: labels that were asked for, gold questions not counted.
        done: how many of them there are.
        labelled: by this rater, gold questions among them.
        skipped: by this rater.
    """

    wanted: int
    done: int
    labelled: int
    skipped: int


def choice_of(answer: Answer, shown_first: Side) -> Choice:
    """Return what an answer about the screen says of the pair."""
    other: Side = "second" if shown_first == "first" else "first"
    sides: dict[str, Side] = {"left": shown_first, "right": other}
    return sides.get(answer, cast(Choice, answer))


def answer_of(choice: Choice, shown_first: Side) -> Answer:
    """Return which answer about the screen says that of the pair."""
    if choice in ("first", "second"):
        return "left" if choice == shown_first else "right"
    return cast(Answer, choice)
