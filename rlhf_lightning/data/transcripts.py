r"""Preferences between two transcripts, as Anthropic/hh-rlhf writes them, read as conversations.

A row holds `chosen` and `rejected`, each a whole dialogue in one text:
`\n\nHuman: ...\n\nAssistant: ...\n\nHuman: ...\n\nAssistant: ...`. As plain texts, the prompt
would be what both sides share, which swallows the first words of two answers that begin alike, and
an instruction-tuned model would see "Human:" where it expects its chat template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rlhf_lightning.data.errors import BadRecordError, Location, describe
from rlhf_lightning.data.files import LocatedRow, Row
from rlhf_lightning.data.records import Split
from rlhf_lightning.data.sources import HubSource

ROLES = {"Human": "user", "Assistant": "assistant"}
SIDES = ("chosen", "rejected")
_TURN = re.compile(r"\n\n(Human|Assistant):")


class TranscriptSource(HubSource):
    """Records of a hub data set whose `chosen` and `rejected` are transcripts.

    The arguments are those of `HubSource`. A row whose texts are not transcripts is a bad record.
    """

    def _rows(self, split: Split) -> Iterable[LocatedRow] | None:
        rows = super()._rows(split)
        return None if rows is None else _as_conversations(rows)


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
        raise BadRecordError(where, found, "use rlhf_lightning.data.sources.HubSource for others")
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


def _as_conversations(rows: Iterable[LocatedRow]) -> Iterator[LocatedRow]:
    for where, row in rows:
        if isinstance(row, BadRecordError):
            yield where, row
            continue
        try:
            parsed: Row = {key: parse_transcript(row.get(key), key, where) for key in SIDES}
        except BadRecordError as error:
            yield where, error
        else:
            yield where, {**row, **parsed}
