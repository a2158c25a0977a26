"""Text that spells control tokens: it stays text, and only a template's own markers are tokens.

A tokenizer finds its special tokens by their spelling, wherever it stands: `<|im_end|>` in a user's
message would end the turn. Text without such a spelling never comes here; it is tokenized as the
tokenizer does it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, proxy

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.text.messages import Messages
from rlhf_lightning.text.turn_end import turn_end

# Noncharacters of Unicode, which no text holds.
_HIDDEN, _MARKER = "\ufdd1", "\ufdd2"


class ControlTokens:
    """The control tokens of a tokenizer, and its twin that does not find them in text.

    They are its special tokens and the token with which its chat template ends a response. The twin
    has the same ids; it knows the control tokens under names that no text spells. So the pieces of
    a text are cut, normalized and merged as the tokenizer itself does it. (With
    `split_special_tokens=True` the tokenizer would still read a text's `</s>` as the token if it is
    in a Unigram vocabulary, and so with an end of turn that is no special token.)

    Args:
        tokenizer: the tokenizer, left unchanged.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Note the control tokens; the twin is made when a text needs it."""
        self._tokenizer: Any = proxy(tokenizer)  # whose cache this is in
        self.contents = _contents(tokenizer)
        longest_first = sorted(self.contents, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def spelled_in(self, *texts: Any) -> bool:
        """Return True if one of the texts, or a message of it, spells a control token."""
        return any(
            self._pattern.search(part) is not None for text in texts for part in _parts(text)
        )

    def hide(self, messages: Messages) -> Messages:
        """Return the messages with what they spell under names that `encoding` knows."""
        return tuple(self.hidden(message) for message in messages)

    def hidden(self, value: Any) -> Any:
        """Return a nested value with what its texts spell hidden likewise."""
        if isinstance(value, str):
            self.check(value)
            numbers = {spelling: i for i, spelling in enumerate(self.contents)}
            return self._pattern.sub(lambda m: f"{_HIDDEN}{numbers[m.group()]}{_HIDDEN}", value)
        if isinstance(value, Mapping):
            return {key: self.hidden(each) for key, each in value.items()}
        return [self.hidden(each) for each in value] if isinstance(value, list | tuple) else value

    def encoding(self, *parts: str, add_special_tokens: bool = False) -> tuple[Any, int]:
        """Encode parts, with what is hidden, as one text: what else they spell is tokens.

        Returns:
            The encoding, and how many characters of its offsets are the first part's.
        """
        if not any(_HIDDEN in part for part in parts) and self._tokenizer.is_fast:
            text = "".join(parts)
            encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
            return encoded.encodings[0], len(parts[0])
        marked = [
            self.reveal(self._pattern.sub(lambda found: self._names[found.group()], part))
            for part in parts
        ]
        encoding = self.twin.encode("".join(marked), add_special_tokens=add_special_tokens)
        return encoding, len(marked[0])

    def reveal(self, text: str) -> str:
        """Return the text with everything that was hidden spelled out."""
        spelled = [self.contents[int(i)] for i in re.findall(f"{_HIDDEN}(\\d+){_HIDDEN}", text)]
        rest = re.split(f"{_HIDDEN}\\d+{_HIDDEN}", text)
        return "".join(a + b for a, b in zip(rest, [*spelled, ""], strict=True))

    def check(self, text: str) -> None:
        """Check a text that spells a control token.

        Raises:
            ValueError: if it holds what marks tokens.
        """
        if _HIDDEN in text or _MARKER in text:
            raise ValueError(
                f"a text spells {self._spelling(text)!r} and holds U+FDD1 or U+FDD2, which are no "
                "characters: take them out"
            )

    def _spelling(self, text: str) -> str:
        found = self._pattern.search(text)
        return "" if found is None else found.group()

    @property
    def _names(self) -> Mapping[str, str]:
        return {each: f"{_MARKER}{i}{_MARKER}" for i, each in enumerate(self.contents)}

    @cached_property
    def twin(self) -> Tokenizer:
        """The tokenizer that takes what a text spells for text.

        Raises:
            ValueError: if the tokenizer is no fast one.
        """
        if not self._tokenizer.is_fast:
            raise ValueError(
                f"a text spells one of {', '.join(self.contents[:4])}, ..., and "
                f"{self._tokenizer.__class__.__name__}, which is no fast tokenizer, would take it "
                "for a control token: take it out, or say rendered: true if it is meant as one"
            )
        form = json.loads(self._tokenizer.backend_tokenizer.to_str())
        return Tokenizer.from_str(json.dumps(_renamed(form, self._names)))


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    """Return the control tokens of a tokenizer, made once as long as they are the same."""
    known = _KNOWN.get(tokenizer)
    if known is None or known.contents != _contents(tokenizer):
        known = _KNOWN[tokenizer] = ControlTokens(tokenizer)
    return known


_KNOWN: WeakKeyDictionary[Any, ControlTokens] = WeakKeyDictionary()


def _parts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _parts(each)


def _contents(tokenizer: PreTrainedTokenizerBase) -> Sequence[str]:
    end = turn_end(tokenizer)
    special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
    if not tokenizer.is_fast:
        special += tokenizer.all_special_tokens
    return tuple(dict.fromkeys([*special, *([] if end is None else [end.token])]))


def _renamed(form: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a tokenizer's JSON in which tokens have other names and the same ids."""
    for token in form["added_tokens"]:
        if token["content"] in names:
            token |= {"content": names[token["content"]], "special": False, "normalized": False}
    model = form["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    else:
        model["vocab"] = {names.get(piece, piece): i for piece, i in vocabulary.items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:  # none that makes or takes a control token
        model["merges"] = [
            pair for pair in model["merges"] if names.keys().isdisjoint([*pair, "".join(pair)])
        ]
    return form | {"truncation": None, "padding": None}
