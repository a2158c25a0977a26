r"""Preferences between two transcripts, as Anthropic/hh-rlhf writes them, read as conversations.

A row holds `chosen` and `rejected`, each a whole dialogue in one text:
`\n\nHuman: ...\n\nAssistant: ...\n\nHuman: ...\n\nAssistant: ...`. As plain texts, the prompt
would be what both sides share, which swallows the first words of two answers that begin alike, and
an instruction-tuned model would see "Human:" where it expects its chat template.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.files import LocatedRow, Row
from rlhf_lightning.data.records import Split
from rlhf_lightning.data.sources.base import HubSource
from rlhf_lightning.data.sources.dialogues import SIDES, parse_transcript


class TranscriptSource(HubSource):
    """Records of a hub data set whose `chosen` and `rejected` are transcripts.

    The arguments are those of `HubSource`. A row whose texts are not transcripts is a bad record.
    """

    def _rows(self, split: Split) -> Iterable[LocatedRow] | None:
        rows = super()._rows(split)
        return None if rows is None else _as_conversations(rows)


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
