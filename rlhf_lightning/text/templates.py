"""Conversations as a chat template writes them."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from rlhf_lightning.text.limits import limited
from rlhf_lightning.text.messages import Messages


def render_chat(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, *, add_generation_prompt: bool = True
) -> str:
    """Return a conversation as its chat template writes it.

    Raises:
        ValueError: if the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the records are conversations but the tokenizer has no chat template: set "
            "tokenizer.chat_template, take an instruction-tuned tokenizer, or give plain text"
        )
    conversation = [dict(message) for message in messages]
    with limited():
        return str(
            tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )
