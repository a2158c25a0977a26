"""Warnings before training: prompts in the wrong form, read twice, a length that cuts responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.data.conversations import placed
from rlhf_lightning.data.encode import encode_all
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    Origin,
    PreferenceRecord,
    Record,
    RecordKind,
    Split,
    TextRecord,
)
from rlhf_lightning.data.sources.base import RecordSource, RowSource
from rlhf_lightning.data.summary import part_lengths
from rlhf_lightning.text.forms import SYSTEM
from rlhf_lightning.text.messages import Text

MOST_CUT = 0.1
NUM_LOOKED_AT = 500
UNLIMITED = 1 << 30
_WITH_RESPONSES: tuple[RecordKind, ...] = ("demonstrations", "preferences")


def warn_of_plain_prompts(records: Iterable[Record], tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn where prompts are plain text and the tokenizer has a chat template."""
    has_template = bool(tokenizer.chat_template)
    asked = [record for record in records if not isinstance(record, TextRecord)]
    plain = sum(isinstance(record.prompt, str) and not record.rendered for record in asked)
    if plain and has_template:
        rank_zero_warn(
            f"{plain} of {len(asked)} rows are plain text, written without the chat template that "
            'the tokenizer has: give messages ([{"role": "user", "content": ...}]) where the model '
            "is to chat"
        )


def warn_of_repeated_prompts(records: Sequence[Record]) -> None:
    """Warn where every response begins with its prompt, which the model then reads twice."""
    if len(records) > 1 and all(map(_repeats_prompt, records)):
        rank_zero_warn(
            f"all {len(records)} responses begin with their prompt, which the model then reads "
            "twice: take it out of the responses"
        )


def _repeats_prompt(record: Record) -> bool:
    if isinstance(record, PreferenceRecord):
        responses: tuple[Text, ...] = (record.chosen, record.rejected)
    elif isinstance(record, DemonstrationRecord):
        responses = (record.completion,)
    else:
        return False
    asked = record.prompt
    if not isinstance(asked, str):  # of several turns a response may quote the last one
        asked = tuple(message for message in asked if message["role"] not in SYSTEM)
    prompt = _last_text(asked) if isinstance(asked, str) or len(asked) == 1 else ""
    return bool(prompt) and any(_last_text(text).startswith(prompt) for text in responses)


def _last_text(text: Text) -> str:
    if not isinstance(text, str):
        text = text[-1]["content"] if text else ""
    return " ".join(text.split()) if isinstance(text, str) else ""


@rank_zero_only
def warn_of_cut_responses(
    source: RecordSource,
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    *,
    key: str,
) -> None:
    """Warn if more than a tenth of the data's own responses are longer than sampled ones may be.

    Looks at the first 500 demonstrations, or preferred responses; a set of prompts has none.

    Args:
        source: source of the prompts.
        split: split of the records.
        tokenizer: tokenizer of the policy.
        max_new_tokens: most tokens of a sampled response.
        key: configuration key that sets it.
    """
    lengths = sorted(_response_lengths(source, split, tokenizer))
    cut = sum(length > max_new_tokens for length in lengths)
    if cut > MOST_CUT * len(lengths):
        enough = lengths[int(0.95 * len(lengths))]
        rank_zero_warn(
            f"{cut} of {len(lengths)} responses of the data have more tokens than "
            f"{key}={max_new_tokens}, so a policy that writes like them is cut off: "
            f"{key}={enough} holds 95 % of them"
        )


def _response_lengths(
    source: RecordSource, split: Split, tokenizer: PreTrainedTokenizerBase
) -> Sequence[int]:
    if isinstance(source, RowSource):  # nothing is made of its rows, and none is a bad record
        origin = Origin(skip=True)
        found = [placed(r.record, origin, source.system_into_user) for r in source.parsed(split)]
    else:
        found = list(_asked(source, split))
    records = [r for r in found if isinstance(r, DemonstrationRecord | PreferenceRecord)]
    rows, _ = encode_all(records[:NUM_LOOKED_AT], tokenizer, max_length=UNLIMITED)
    lengths = map(part_lengths, rows)
    return [parts["chosen" if "chosen" in parts else "response"] for parts in lengths]


def _asked(source: RecordSource, split: Split) -> Sequence[Record]:
    for kind in _WITH_RESPONSES:
        with suppress(ValueError, TypeError, LookupError, NotImplementedError):  # it has none
            return source.records(kind, split)
    return ()
