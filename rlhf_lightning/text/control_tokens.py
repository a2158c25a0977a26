"""Text that spells control tokens: refused in data, disarmed for reward models and judges.

A tokenizer finds its special tokens by their spelling, wherever it stands: `<|im_end|>` in a user's
message would end the turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_lightning.text.templates import any_of, turn_end


class ControlTokens:
    """The special tokens of a tokenizer, and the one with which its template ends a response."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Note their spellings."""
        end = turn_end(tokenizer)
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        special += tokenizer.all_special_tokens
        self.contents = tuple(dict.fromkeys([*special, *([] if end is None else [end.token])]))
        self._pattern = any_of(self.contents)

    def spelled_in(self, *values: Any) -> str | None:
        """Return the first control token that a text, message or nested value spells, or None."""
        found = (self._pattern.search(text) for value in values for text in _texts(value))
        return next((one.group() for one in found if one is not None), None)

    def disarmed(self, value: Any) -> Any:
        """Return a nested value in which a space breaks each control token that a text spells."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: f"{found[0][:1]} {found[0][1:]}", value)
        if isinstance(value, Mapping):
            return {key: self.disarmed(each) for key, each in value.items()}
        is_list = isinstance(value, list | tuple)
        return type(value)(self.disarmed(each) for each in value) if is_list else value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)
