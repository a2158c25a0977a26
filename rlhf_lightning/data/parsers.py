"""One row under our names to one record: a parser for each format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_lightning.data.conversations import (
    check_answer,
    check_characters,
    check_prompt,
    implied_prompt,
    parse_messages,
    parse_text,
)
from rlhf_lightning.data.errors import BadRecordError, Location, describe
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    PromptRecord,
    Record,
    TextRecord,
)

OurRow = Mapping[str, Any]


def _parse_text_row(row: OurRow, where: Location) -> TextRecord:
    text = row["text"]
    if not isinstance(text, str):
        found = f"the key 'text' holds {describe(text)}, expected text"
        raise BadRecordError(where, found, "give conversations under the key 'messages'")
    check_characters(text, "the key 'text'", where)
    if not text.strip():
        raise BadRecordError(where, "the key 'text' is empty", "fill it, or leave the record out")
    return TextRecord(text)


def _parse_prompt_row(row: OurRow, where: Location) -> PromptRecord:
    prompt = parse_text(row["prompt"], "prompt", where)
    check_prompt(prompt, where)
    if not prompt:
        fix = "fill it, or leave the record out"
        raise BadRecordError(where, "the key 'prompt' is empty", fix)
    return PromptRecord(prompt)


def _parse_completion_row(row: OurRow, where: Location) -> DemonstrationRecord:
    prompt = parse_text(row["prompt"], "prompt", where)
    completion = parse_text(row["completion"], "completion", where)
    check_prompt(prompt, where)
    check_answer(prompt, completion, "completion", where)
    return DemonstrationRecord(prompt, completion)


def _parse_messages_row(row: OurRow, where: Location) -> DemonstrationRecord:
    messages = parse_messages(row["messages"], "messages", where)
    if messages[-1]["role"] != "assistant":
        found = f"the last of 'messages' is from {messages[-1]['role']!r}, expected 'assistant'"
        raise BadRecordError(where, found, "end with the answer, or give it as 'prompt' only")
    if all(message["role"] != "user" for message in messages):
        found = "'messages' has no message from 'user'"
        raise BadRecordError(where, found, "put the question before the answer")
    check_answer(messages[:-1], messages[-1:], "messages", where)
    return DemonstrationRecord(messages[:-1], messages[-1:])


def _parse_preference_row(row: OurRow, where: Location) -> PreferenceRecord:
    chosen = parse_text(row["chosen"], "chosen", where)
    rejected = parse_text(row["rejected"], "rejected", where)
    if chosen == rejected:
        found = f"'chosen' and 'rejected' are the same: {describe(row['chosen'])}"
        raise BadRecordError(where, found, "leave the pair out: it says nothing")
    given = parse_text(row["prompt"], "prompt", where) if "prompt" in row else None
    prompt, chosen, rejected = implied_prompt(given, chosen, rejected, where)
    check_prompt(prompt, where)
    check_answer(prompt, chosen, "chosen", where)
    check_answer(prompt, rejected, "rejected", where)
    return PreferenceRecord(prompt, chosen, rejected, margin=_parse_margin(row, where))


def _parse_margin(row: OurRow, where: Location) -> float | None:
    value = row.get("margin")
    if value is None or value == "":
        return None
    try:
        # A CSV cell is text, and a truth value is an int to Python.
        margin = math.nan if isinstance(value, bool | list | dict) else float(value)
    except (ValueError, OverflowError):  # a whole number of 400 digits is no float
        margin = math.nan
    if not math.isfinite(margin) or margin < 0:
        found = f"the key 'margin' holds {describe(value)}, expected a finite number >= 0"
        raise BadRecordError(where, found, "swap the sides of a negative one, or leave the key out")
    return margin


PARSERS: dict[str, Callable[[OurRow, Location], Record]] = {
    "text": _parse_text_row,
    "prompt": _parse_prompt_row,
    "prompt+completion": _parse_completion_row,
    "messages": _parse_messages_row,
    "prompt+chosen+rejected": _parse_preference_row,
    "chosen+rejected": _parse_preference_row,
}
