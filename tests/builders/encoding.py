"""Messages, and the row of one record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlhf_lightning.data.encode import RecordEncoder
from rlhf_lightning.data.records import Record


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def encode_one(record: Record, tokenizer: Any, **options: Any) -> Any:
    """Return the row of a record, None where it is dropped."""
    return next(iter(RecordEncoder(tokenizer, **options)(record)), None)


def encode_all(records: Iterable[Record], tokenizer: Any, **options: Any) -> tuple[Any, Any]:
    """Return the rows of records, and the report of their encoding."""
    encoder = RecordEncoder(tokenizer, **options)
    return encoder.encode_all(records), encoder.report
