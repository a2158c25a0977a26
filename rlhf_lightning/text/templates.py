"""Conversations as a chat template writes them, with the proof that it writes all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_lightning.text.fidelity import Fidelity
from rlhf_lightning.text.forms import READ_BY_US, REFUSALS, SYSTEM, apply, form_of
from rlhf_lightning.text.messages import Messages
from rlhf_lightning.text.template_date import leading_settings

_OTHER = "set another template with model.chat_template=FILE or NAME"
_SKIP = "leave such records out with dataset.source.on_bad_record=skip"
_SYSTEM = "put system texts into the user's turn with dataset.source.system_into_user=true"
_PROBES = 4  # conversations of a length that show that a key is not read
_COUNT = "learn the rest with dataset.source.on_template_loss=warn"


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
    form = form_of(tokenizer)
    options = {**form.given(variables or {}), "add_generation_prompt": add_generation_prompt}
    try:
        return apply(tokenizer, [form.shaped(message) for message in messages], **options)
    except REFUSALS as error:
        fix = _fix(any(message["role"] in SYSTEM for message in messages), _SKIP, _OTHER)
        raise ChatTemplateError(f"the chat template refuses the record: {error}", fix) from error


def _fix(has_system: bool, *ways: str) -> str:
    *first, last = (*[_SYSTEM] * has_system, *ways)
    return f"{', '.join(first)}, or {last}"


def render_chat(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
    learnt: Collection[int] = (),
    losses: list[str] | None = None,
) -> str:
    """Return the whole conversation as its chat template writes it.

    Args:
        messages: messages of the conversation.
        tokenizer: the tokenizer with the template.
        add_generation_prompt: end with the text that introduces a response.
        variables: further variables of the template, such as `tools`.
        learnt: indices of the messages that are learnt, whose thoughts must be written.
        losses: collects what the template does not write, in place of an error.

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
    lost = Fidelity(messages, variables or {}, form_of(tokenizer), write, learnt).lost(text)
    if lost and losses is None:
        found = f"the chat template does not write {', nor '.join(lost)}"
        of_system = any(f"({role})" in each for role in SYSTEM for each in lost)
        raise ChatTemplateError(found, _fix(of_system, _OTHER, _SKIP, _COUNT))
    if losses is not None:
        losses += lost
    return text


def unread_keys(
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[str]:
    """Yield the keys of messages, and the variables, that the chat template does not read."""
    template = str(tokenizer.chat_template)
    further = ((m["role"], key) for m in messages if len(m) > 2 for key in m.keys() - READ_BY_US)
    for role, key in set(further):
        if not _names(key, template) or not _is_read(role, key, messages, variables, tokenizer):
            yield str(key)
    for key in variables.keys() - {"tools", "documents"}:  # those are looked for in the text
        if not _names(key, template) or key in leading_settings(template):
            yield str(key)


def _names(key: str, template: str) -> bool:
    return re.search(rf"\b{re.escape(str(key))}\b", template) is not None


def _is_read(
    role: str,
    key: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
) -> bool:
    """Return True unless the template writes the same whatever the key holds in a role's messages.

    A template may name the key of something else: a call of a tool has a name, too. It may read the
    key of some messages only, such as the last: a few conversations of a length are enough to tell.
    """
    known = form_of(tokenizer).read
    place = role, key, len(messages)
    if (role, key) not in known and known.get(place, 0) < _PROBES:

        def changed(change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> list[Any]:
            return [change(m) if m["role"] == role and key in m else m for m in messages]

        other = changed(lambda message: {**message, key: "zq"})
        without = changed(lambda message: {k: v for k, v in message.items() if k != key})
        try:
            texts = {
                write_chat(m, tokenizer, variables=variables) for m in (messages, other, without)
            }
        except ChatTemplateError:  # sides of a pair are no conversation
            texts = set()
        known[place if len(texts) == 1 else (role, key)] = known.get(place, 0) + 1
    return (role, key) in known
