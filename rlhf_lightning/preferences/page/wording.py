"""The words of the page that are not in its templates."""

from __future__ import annotations

from typing import NamedTuple

from rlhf_lightning.preferences.tasks import Answer


class Button(NamedTuple):
    """A way to answer: its value, its key and its words."""

    answer: Answer
    key: str
    text: str


BUTTONS = (
    Button("left", "1", "Answer 1"),
    Button("right", "2", "Answer 2"),
    Button("tie", "t", "Tie"),
    Button("both_bad", "b", "Both bad"),
    Button("skip", "s", "Skip"),
)
NOTES = {
    "gone": "That pair has been rated by others meanwhile; your answer was not needed. Here is "
    "the next one.",
    "repeated": "That answer had arrived already.",
    "differs": "Not kept: as {rater} you had given another answer to that pair, in another window "
    "or on another machine, and the first one stays. Undo takes it back. If somebody else works "
    "under this name, one of you signs out and takes another.",
    "undone": "Not kept: as {rater} you had taken that answer back, in another window or on "
    "another machine. Answer what is shown.",
    "again": "Signed in as {rater}, who has {labels} so far. If you are somebody else, sign "
    "out and take another name: one name is one rater, and case and spaces make no other.",
    "nothing": "There is nothing to take back: you have not answered yet, or others have "
    "completed the pair that you skipped.",
}
