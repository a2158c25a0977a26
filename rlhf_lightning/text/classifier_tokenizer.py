"""The tokenizer of a sequence classifier: rows that end where responses do, then only padding.

The classifiers of transformers read a row's score at its last token that is not the pad token. That
must be the one that ends the response, where the reward was trained. It is another one if the
response ends with the pad token, or if a chat template writes something behind the end, as ChatML
does with a newline and Phi 3 with EOS.
"""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_lightning.text.turn_end import turn_end

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
    "{{- text if add_generation_prompt or not text.endswith(ANSWER_END) "
    "else text[:text | length - BEHIND] -}}",
)


def classifier_tokenizer(
    tokenizer: PreTrainedTokenizerBase, num_embeddings: int
) -> PreTrainedTokenizerBase:
    """Return a copy with a pad token that is not EOS and a chat template that ends responses.

    No id of a token changes. The pad token is the tokenizer's own, else a special token of its
    vocabulary that no text uses, else a new token `<|pad|>`, which may need a row more than the
    model has (`with_row_for` of models/export.py). Padding is on the right: models with absolute
    positions count columns.

    Args:
        tokenizer: the tokenizer, left unchanged.
        num_embeddings: rows of the model's input embedding.
    """
    own: Any = copy.deepcopy(tokenizer)
    own.padding_side = "right"
    _end_template_at_its_stop(own)
    end = turn_end(own)
    ends = {None, own.eos_token_id, None if end is None else end.token_id}
    if own.pad_token_id not in ends:
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


def _end_template_at_its_stop(tokenizer: Any) -> None:
    """Remove what the template writes behind the token that ends a response."""
    end = turn_end(tokenizer)
    if not isinstance(tokenizer.chat_template, str) or end is None or not end.behind:
        return
    # Jinja drops the newline at the end of a template; inside of another it would stay.
    body = tokenizer.chat_template.removesuffix("\n")
    closing = _CUT[1].replace("ANSWER_END", json.dumps(end.token + end.behind))
    tokenizer.chat_template = _CUT[0] + body + closing.replace("BEHIND", str(len(end.behind)))
