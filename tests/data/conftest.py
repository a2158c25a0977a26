"""Tiny tokenizers, one byte a token, and files of records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(
    *,
    adds_bos: bool = False,
    adds_eos: bool = False,
    pad_is_eos: bool = True,
    template: str | None = None,
    merges: Iterable[tuple[str, str]] = (),
    eos: str | None = "<|im_end|>",
) -> PreTrainedTokenizerFast:
    """Return a byte tokenizer: every character of ASCII text is a token of its own."""
    merges = list(merges)
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(m) for m in merges)]
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>", "<pad>"]
    core.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    if adds_bos or adds_eos:
        single = f"{'<s> ' if adds_bos else ''}$A{' <|im_end|>' if adds_eos else ''}"
        ids = [(token, core.token_to_id(token)) for token in ("<s>", "<|im_end|>")]
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token=eos,
        pad_token=("<|im_end|>" if pad_is_eos else "<pad>") if eos else None,
        chat_template=template,
    )


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
