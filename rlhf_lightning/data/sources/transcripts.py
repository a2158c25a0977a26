r"""Preferences between two transcripts, as Anthropic/hh-rlhf writes them, read as conversations.

A row holds `chosen` and `rejected`, each a whole dialogue in one text: `\n\nHuman:
...\n\nAssistant: ...\n\nHuman: ...\n\nAssistant: ...`. As plain texts, the prompt would be what
both sides share, which swallows the first words of two responses that begin alike, and an
instruction-tuned model would see "Human:" where it expects its chat template.
"""

from __future__ import annotations

from collections.abc import Callable

from rlhf_lightning.data.conversations import SIDES, parse_transcript
from rlhf_lightning.data.errors import Location
from rlhf_lightning.data.files import Row
from rlhf_lightning.data.formats import ParsedRow
from rlhf_lightning.data.sources.base import HubSource


class TranscriptSource(HubSource):
    """Records of a hub dataset whose `chosen` and `rejected` are transcripts.

    The arguments are those of `HubSource`. A row whose texts are not transcripts is a bad record.
    """

    def _parser(self) -> Callable[[Row, Location], ParsedRow]:
        parse = super()._parser()

        def parse_dialogues(row: Row, where: Location) -> ParsedRow:
            sides = {key: parse_transcript(row.get(key), key, where) for key in SIDES}
            return parse({**row, **sides}, where)

        return parse_dialogues
