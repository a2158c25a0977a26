r"""Transcripts as Anthropic/hh-rlhf writes them, a whole dialogue in one text.

`\n\nHuman: ...\n\nAssistant: ...\n\nHuman: ...\n\nAssistant: ...`
"""

from __future__ import annotations

import re

from rlhf_lightning.data.errors import BadRecordError, Location, describe

ROLES = {"Human": "user", "Assistant": "assistant"}
ANSWER_MARK = "\n\nAssistant:"
SIDES = ("chosen", "rejected")
_TURN = re.compile(r"\n\n(Human|Assistant):")


def is_transcript(text: object) -> bool:
    r"""Return True for a text that starts with `\n\nHuman:`."""
    return isinstance(text, str) and text.startswith("\n\nHuman:")


def parse_transcript(text: object, key: str, where: Location) -> list[dict[str, str]]:
    r"""Return the messages of a transcript, white space around each removed.

    Args:
        text: `\n\nHuman: ...\n\nAssistant: ...`.
        key: the name of its column, for errors.
        where: the row, for errors.

    Raises:
        BadRecordError: if it is no text, starts otherwise, one side speaks twice in a row, or the
            last turn is not the assistant's.
    """
    if not isinstance(text, str) or _TURN.match(text) is None:
        found = f"the key {key!r} holds {describe(text)}, expected '\\n\\nHuman: ...'"
        raise BadRecordError(
            where, found, "use rlhf_lightning.data.sources.base.HubSource for others"
        )
    _, *pieces = _TURN.split(text)
    names, contents = pieces[::2], pieces[1::2]
    for number, name in enumerate(names):
        if name != ("Human", "Assistant")[number % 2]:
            again = "again " if number else ""
            found = f"turn {number + 1} of {key!r} is {again}from {name!r}"
            raise BadRecordError(where, found, "join the turns, or leave the record out")
    if names[-1] != "Assistant":
        found = f"{key!r} ends with a turn of 'Human', so it has no answer"
        raise BadRecordError(where, found, "leave the record out")
    return [
        {"role": ROLES[name], "content": content.strip()}
        for name, content in zip(names, contents, strict=True)
    ]
