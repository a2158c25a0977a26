"""Conversations as a chat template writes them, with the proof that it writes all of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_lightning.text.fidelity import lost
from rlhf_lightning.text.forms import READ_BY_US, REFUSALS, SYSTEM, apply, form_of
from rlhf_lightning.text.messages import Messages
from rlhf_lightning.text.template_date import leading_settings

_OTHER = "set another template with model.chat_template=FILE or NAME"
_SKIP = "leave such records out with dataset.source.on_bad_record=skip"
_SYSTEM = "put system texts into the user's turn with dataset.source.system_into_user=true"


class ChatTemplateError(ValueError):
    """A conversation that a chat template refuses, or does not write in full.

    Args:
        found: the fact, first clause of the message.
        fix: the fix, second clause of the message.
    """

    def __init__(self, found: str, fix: str) -> None:
        """Make the message."""
        super().__init__(f"{found}. Fix: {fix}")
        self.found = found
        self.fix = fix


def write_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return what the chat template makes of a conversation, whether that is all of it or not.

    Raises:
        ValueError: if the tokenizer has no chat template.
        ChatTemplateError: if the template refuses the conversation.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template, and the records are conversations: set "
            "model.chat_template=FILE or NAME (in Python chat_template=), or use plain text"
        )
    try:
        return apply(
            tokenizer, messages, variables or {}, add_generation_prompt=add_generation_prompt
        )
    except REFUSALS as error:
        fix = _fix(any(message["role"] in SYSTEM for message in messages))
        raise ChatTemplateError(f"the chat template refuses the record: {error}", fix) from error


def _fix(has_system: bool) -> str:
    return f"{f'{_SYSTEM}, ' * has_system}{_OTHER}, or {_SKIP}"


def render_chat(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
    learnt: Collection[int] = (),
) -> str:
    """Return the whole conversation as its chat template writes it.

    Args:
        messages: messages of the conversation.
        tokenizer: the tokenizer with the template.
        add_generation_prompt: end with the text that introduces a response.
        variables: further variables of the template, such as `tools`.
        learnt: indices of the messages that are learnt, whose thoughts must be written.

    Raises:
        ValueError: if the tokenizer has no chat template.
        ChatTemplateError: if the template refuses the conversation, or does not write all of it.
    """

    def write(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        return write_chat(
            messages,
            tokenizer,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )

    text = write(messages, variables or {})
    missing = lost(messages, variables or {}, text, form_of(tokenizer), write, learnt)
    if missing:
        found = f"the chat template does not write {', nor '.join(missing)}"
        of_system = any(f"({role})" in each for role in SYSTEM for each in missing)
        raise ChatTemplateError(found, _fix(of_system))
    return text


def unread_keys(
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[str]:
    """Yield the keys of messages, and the variables, that the chat template does not name."""
    template = str(tokenizer.chat_template)
    further = {str(key) for message in messages for key in message.keys() - READ_BY_US}
    further |= variables.keys() - {"tools", "documents"}  # those are looked for in the text
    for key in further:
        is_set = key in variables and key in leading_settings(template)
        if is_set or re.search(rf"\b{re.escape(key)}\b", template) is None:
            yield key
