"""Loading tokenizers, and what they say about stopping."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or hub name, with a pad token and left padding.

    A tokenizer without a pad token pads with EOS: masks never come from ids, so that is safe.

    Raises:
        ValueError: if it has no EOS token.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {source} has no EOS token: set one before training")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer


def tokenizer_for(
    source: str | Path | None, build: Callable[[], PreTrainedTokenizerBase] | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `source`, or the one that `build` makes where there is no source."""
    if source is None:
        if build is None:
            raise ValueError("a model from scratch needs model.build_tokenizer")
        return build()
    return load_tokenizer(source)


def stop_ids(tokenizer: PreTrainedTokenizerBase, source: str | Path | None) -> tuple[int, ...]:
    """Return every id that ends a response: the tokenizer's EOS and the checkpoint's own list."""
    ids = {int(tokenizer.eos_token_id)}
    if source is not None and (Path(source) / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(str(source)).eos_token_id
        ids |= set(eos if isinstance(eos, list) else [eos] if eos is not None else [])
    return tuple(sorted(ids))
