"""Token ids to texts: for rewards, judges, samples, pages and the examples on the screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from rlhf_lightning.models.whole_weights import listed


def decoded(
    ids: Iterable[int], tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = False
) -> str:
    """Return the text of token ids."""
    return str(tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))


def response_texts(
    responses: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Return responses as text, without special tokens.

    Args:
        responses: ids, without the token that ends one: a tokenizer need not list it among its
            special tokens.
        tokenizer: of the policy.
    """
    return list(tokenizer.batch_decode([list(ids) for ids in responses], skip_special_tokens=True))


def token_names(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return tokens as a message names them: the first few in quotes, and how many more."""
    return listed(map(repr, tokenizer.convert_ids_to_tokens(list(ids))))
