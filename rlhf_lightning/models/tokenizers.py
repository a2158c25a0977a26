"""Loading tokenizers, and what they say about stopping."""

from __future__ import annotations

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


def stop_ids(tokenizer: PreTrainedTokenizerBase, source: str | Path | None) -> tuple[int, ...]:
    """Return every id that ends a response: the tokenizer's EOS and the checkpoint's own list."""
    eos = None if source is None else _generation_config(source).eos_token_id
    named = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return tuple(sorted({int(tokenizer.eos_token_id), *named}))


def _generation_config(source: str | Path) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(str(source))
    except OSError:  # many checkpoints have none
        return GenerationConfig()
