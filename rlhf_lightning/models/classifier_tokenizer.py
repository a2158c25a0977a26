"""The tokenizer of a sequence classifier: rows that end at EOS, behind which only padding stands.

The classifiers of transformers read a row's score at its last token that is not the pad token.
That must be EOS, where the reward was trained. It is not where pad == EOS, and it is not where a
chat template writes something behind EOS, as ChatML does with a newline.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

ADDED = "<|pad|>"
# Names that tokenizers give to tokens of theirs that no text holds, the best first.
_UNUSED = (
    r"<\|finetune_right_pad_id\|>",
    r"<\|pad\|>|<\|padding\|>|<pad>|\[PAD\]",
    r"<\|reserved_special_token_\d+\|>|<\|reserved_\d+\|>|<reserved_?\d+>|\[reserved_?\d+\]",
    r"<\|dummy_\d+\|>|<unused_?\d+>|\[unused_?\d+\]|<\|extra_\d+\|>|\[control_\d+\]",
    r"<\|endoftext\|>|<\|end_of_text\|>",
)
_CUT = (
    "{%- set text %}",
    "{% endset -%}"
    "{{- text if add_generation_prompt or not text.rstrip().endswith(eos_token) "
    "else text.rstrip() -}}",
)
_EXCHANGE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def classifier_tokenizer(
    tokenizer: PreTrainedTokenizerBase, num_embeddings: int
) -> PreTrainedTokenizerBase:
    """Return a copy with a pad token that is not EOS and a chat template that ends with EOS.

    No id of a token changes. The pad token is the tokenizer's own, else a special token of its
    vocabulary that no text uses, else a new token `<|pad|>`, which may need a row more than the
    model has (`with_row_for`). Padding is on the right: models with absolute positions count
    columns.

    Args:
        tokenizer: left as it is.
        num_embeddings: rows of the model's input embedding.
    """
    own: Any = copy.deepcopy(tokenizer)
    own.padding_side = "right"
    _end_template_at_eos(own)
    if own.pad_token_id is not None and own.pad_token_id != own.eos_token_id:
        return own
    token = unused_special_token(own, num_embeddings)
    if token is None:
        own.add_special_tokens({"pad_token": ADDED})
    else:
        own.pad_token = token
    return own


def unused_special_token(tokenizer: PreTrainedTokenizerBase, num_embeddings: int) -> str | None:
    """Return a special token that means padding, is reserved, or ends texts elsewhere; or None.

    Not taken are BOS, EOS and tokens that the chat template writes.
    """
    template = str(tokenizer.chat_template or "")
    taken = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    special = {
        index: token.content
        for index, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and index < num_embeddings and index not in taken
    }
    for pattern in _UNUSED:
        for content in special.values():
            if re.fullmatch(pattern, content) and content not in template:
                return content
    return None


def with_row_for(embedding: Tensor, token_id: int) -> Tensor:
    """Return `[V, H]` input embeddings in which `token_id` has a row: zeros, if it is new."""
    missing = token_id + 1 - len(embedding)
    if missing <= 0:
        return embedding
    return torch.cat([embedding, embedding.new_zeros(missing, embedding.shape[1])])


def _end_template_at_eos(tokenizer: Any) -> None:
    if not isinstance(tokenizer.chat_template, str):
        return
    try:
        text = tokenizer.apply_chat_template(_EXCHANGE, tokenize=False)
    except TemplateError:  # a template for other conversations than this one
        return
    if text != text.rstrip() and text.rstrip().endswith(tokenizer.eos_token):
        # Jinja drops the newline at the end of a template; inside of another it would stay.
        body = tokenizer.chat_template.removesuffix("\n")
        tokenizer.chat_template = body.join(_CUT)
