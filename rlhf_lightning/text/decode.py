"""Token ids to texts: for rewards, judges, samples, pages and the examples on the screen.

A response is decoded together with the end of its prompt and cut behind it. Alone it would lose its
first space, which SentencePiece's decoders take from the start of a text, and the character that
the prompt's last bytes begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, proxy

from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.models.loading import listed

NUM_BEFORE = 16  # tokens of a prompt that a response is decoded with
UNFINISHED = "\ufffd"  # what a part of a character is decoded as


class Completion(NamedTuple):
    """A policy's response behind a prompt, as text.

    Args:
        prompt: the prompt as the policy sees it: plain, or rendered by the policy's template.
        messages: the conversation that the completion ends; a plain prompt has none.
        text: the completion.
        finished: whether it ended by itself.
        rendered: special tokens that a plain prompt spells are tokens.
        variables: further variables of a chat template, such as `tools`.
    """

    prompt: str
    messages: list[dict[str, Any]] | None
    text: str
    finished: bool
    rendered: bool = False
    variables: Mapping[str, Any] = MappingProxyType({})


def decoded(
    ids: Iterable[int], tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = False
) -> str:
    """Return the text of token ids, with the spaces that some tokenizers would take out of it."""
    text = tokenizer.decode(
        [int(i) for i in ids],
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,  # else " ." is "." and " do not" is " don't"
    )
    return str(text)


def response_texts(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    skip_special_tokens: bool = False,
) -> list[str]:
    """Return responses as text, with the special tokens in them but padding.

    A character that the prompt begins and the response ends belongs to the response.

    Args:
        prompts: ids, one row a response, without padding.
        responses: ids, without the token that ends one.
        tokenizer: tokenizer of the policy.
        skip_special_tokens: leave special tokens out.
    """
    decoder = _decoder(tokenizer)
    left_out = decoder.special if skip_special_tokens else {tokenizer.pad_token_id}
    responses = [[i for i in ids if i not in left_out] for ids in responses]
    return [decoder.behind(*row) for row in zip(prompts, responses, strict=True)]


def text_behind(
    before: Sequence[int], ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return the text of ids behind others, as `response_texts` does, with every special token."""
    return _decoder(tokenizer).behind(before, ids)


class _ResponseDecoder:
    """Cached facts on how a tokenizer decodes the start of a text."""

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder
        self.tokenizer: Any = proxy(tokenizer)  # whose cache this is in
        self.bos = tokenizer.bos_token_id
        self.special = {i for i, t in added.items() if t.special} | {*tokenizer.all_special_ids}
        core = tokenizer.backend_tokenizer.model if tokenizer.is_fast else None
        self.words_only = isinstance(core, WordLevel)
        alone = self._ids("a")
        self.drops = int(decoded(alone, tokenizer) == " a")
        # Behind an added token many tokenizers put a space in front, as at the start of a text.
        marks = {i: t.content for i, t in added.items()}
        if self._ids(f"{next(iter(marks.values()), '')}a")[1:] != alone:
            marks = {}
        self.starts_behind = marks.keys()

    def behind(self, prompt: Sequence[int], response: Sequence[int]) -> str:
        """Return the text of a response behind its prompt."""
        if prompt and prompt[0] == self.bos:
            prompt = prompt[1:]
        alone = not prompt or prompt[-1] in self.starts_behind
        if alone or self.words_only:
            text = decoded(response, self.tokenizer)
            return text[self.drops :] if alone and text.startswith(" ") else text
        tail, before = self._end_of(prompt)
        whole = decoded([*tail, *response], self.tokenizer)
        if whole.startswith(before):
            return whole[len(before) :]
        before = before.rstrip(UNFINISHED)
        return (
            whole[len(before) :] if whole.startswith(before) else decoded(response, self.tokenizer)
        )

    def _end_of(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """Return the prompt's last tokens, more where they begin within a character, as text."""
        count = NUM_BEFORE
        while UNFINISHED in (text := decoded(prompt[-count:], self.tokenizer)):
            if count >= len(prompt):
                break
            count *= 4
        return list(prompt[-count:]), text

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


_KNOWN: WeakKeyDictionary[Any, _ResponseDecoder] = WeakKeyDictionary()


def _decoder(tokenizer: PreTrainedTokenizerBase) -> _ResponseDecoder:
    if tokenizer not in _KNOWN:
        _KNOWN[tokenizer] = _ResponseDecoder(tokenizer)
    return _KNOWN[tokenizer]


def token_names(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return tokens as a message names them: the first few in quotes, and how many more."""
    return listed(map(repr, tokenizer.convert_ids_to_tokens(list(ids))))
