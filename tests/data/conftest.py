"""Tokenizers of one byte a token, and files of records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.builders.tokenizers import CHATML, build_tokenizer


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return build_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose pad token is its EOS, with ChatML, which adds nothing by itself."""
    return build_tokenizer(template=CHATML)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: Iterable[Any], name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write
