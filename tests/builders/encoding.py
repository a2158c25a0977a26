"""Messages, and the row of one record."""

from __future__ import annotations

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
