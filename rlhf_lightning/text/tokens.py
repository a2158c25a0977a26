"""Texts to token ids: prompts, and responses up to and including the token that ends them.

Prompt and response are one text. It is tokenized once, and cut where the prompt ends:

* A token that holds both the end of the prompt and the start of the response belongs to the
  response. Both sides of a pair share the tokens that belong to the prompt on both.
* `Rendered.is_merged` reports this, because a policy that is given the prompt alone sees other
  tokens there. It also reports white space whose tokens change before a response: GPT-2 has one
  token for an empty line at the end of a text, and two in front of a word.
* A control token that takes white space behind it, as `<|assistant|>` of Phi 3 does, belongs to
  the prompt.
* A word-level tokenizer has no token for a part of a word: there a response starts a new word.
* A slow tokenizer gives no character offsets: the prompt ends where the tokens of the prompt alone
  and of the whole text diverge.

A tokenizer finds its special tokens by their spelling, wherever it is: `<|im_end|>` in a user's
message would end the turn. Texts that spell one are refused, and disarmed for reward models.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unicodedata import combining

from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.text.messages import BadValueError, Messages, Text
from rlhf_lightning.text.render import ChatTemplateError, any_of, render_chat, turn_end, write_chat


class Rendered(NamedTuple):
    """Token ids of a prompt and a response to it.

    All are attended: padding is added where rows become a batch. Those of the response are trained,
    for they are what a policy would write behind the prompt.

    Args:
        ids: token ids of both.
        num_prompt: number of tokens of the prompt.
        is_merged: whether the end of the prompt has other tokens where it is alone.
    """

    ids: list[int]
    num_prompt: int = 0
    is_merged: bool = False

    @property
    def prompt(self) -> list[int]:
        """Ids of the prompt."""
        return self.ids[: self.num_prompt]

    @property
    def response(self) -> list[int]:
        """Ids of the response, with the one that ends it."""
        return self.ids[self.num_prompt :]


class ControlTokens:
    """The special tokens of a tokenizer, and the one with which its template ends a response.

    Args:
        tokenizer: the tokenizer.
        but: tests which of them are left out.
    """

    def __init__(self, tokenizer: Any, but: Callable[[str], bool] = lambda _: False) -> None:
        """Note their spellings."""
        end = turn_end(tokenizer)
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        special += [*tokenizer.all_special_tokens, *(() if end is None else (end.token,))]
        self.contents = tuple(token for token in dict.fromkeys(special) if not but(token))
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
        return type(value)(map(self.disarmed, value)) if isinstance(value, list | tuple) else value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)


class TextEncoder:
    """A tokenizer with what it was asked once, and the last text that it tokenized.

    It may take the place of `tokenizer` in the functions below.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Ask the tokenizer once for what it would look up each time."""
        self.tokenizer: Any = tokenizer
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.turn_end = turn_end(tokenizer)
        ends = [self.bos, self.eos, tokenizer.pad_token_id]
        ends += [] if self.turn_end is None else [self.turn_end.token_id]
        unknown = tokenizer.unk_token_id  # of tokenizers that know every text one of the others
        self.unknown = None if unknown in ends else unknown
        self.control = ControlTokens(tokenizer)
        probe = tokenizer("a", return_special_tokens_mask=True, verbose=False)
        special: list[int] = list(probe["special_tokens_mask"])  # type: ignore[arg-type]
        self.front: list[int] = list(probe["input_ids"])[: [*special, 0].index(0)]  # type: ignore[arg-type]
        added = tokenizer.added_tokens_decoder.items()
        self._takes_space = {i for i, t in added if t.rstrip}
        self.ends_text = {i for i, t in added if t.special and not t.lstrip}
        core = tokenizer.backend_tokenizer.model if tokenizer.is_fast else None  # type: ignore[attr-defined]
        self._words_only = isinstance(core, WordLevel)
        self._last: tuple[str, Any, list[int]] = ("", None, [])
        private = tokenizer("\U0010fffd", add_special_tokens=False, verbose=False)["input_ids"]
        self._drops_unknown = not private
        self._has_token: dict[str, bool] = {}
        stops = any_of([tokenizer.eos_token or "", self.turn_end.token if self.turn_end else ""])
        self._ended = re.compile(rf"({stops.pattern})(?:\s|{stops.pattern})+\Z")

    def joined(self, prompt: str, response: str) -> tuple[str, int]:
        """Return prompt and response as one text, and where the response starts in it.

        What a template wrote behind the first stop token that ends the response is left out.
        """
        response = self._ended.sub(r"\1", response)
        words = self._words_only and prompt and response
        apart = words and not (prompt[-1].isspace() or response[0].isspace())
        return f"{prompt} {response}" if apart else prompt + response, len(prompt)

    def cut(self, text: str, at: int) -> Rendered:
        """Return the ids of a text, none of them added, with the prompt up to a character.

        The start of the last text, up to a special token, is not tokenized a second time: such are
        the earlier turns of a conversation.
        """
        last, encoding, ids = self._last
        end = len(text)
        behind = encoding.char_to_token(end) if last.startswith(text) and encoding else None
        if behind and ids[behind] in self.ends_text and encoding.token_to_chars(behind)[0] == end:
            return self._cut(encoding, ids[:behind], at, text)
        ((encoding, ids),) = self._tokenized([text])
        self._last = text, encoding, ids
        return self._cut(encoding, ids, at, text)

    def check(self, *texts: Any) -> None:
        """Check that texts, messages and variables spell no control token.

        Raises:
            BadValueError: if one does.
        """
        if (token := self.control.spelled_in(*texts)) is not None:
            fix = "take it out, set dataset.source.rendered=true if it is meant as the token, or "
            fix += "leave such records out with dataset.source.on_bad_record=skip"
            raise BadValueError(f"a text spells the control token {token!r}", fix)

    def drops(self, *texts: Text) -> bool:
        """Return True if a character gets no token: a BPE model without `unk` leaves it out."""
        if not self._drops_unknown:
            return False
        parts = (t if isinstance(t, str) else "".join(m["content"] for m in t) for t in texts)
        characters = {c for c in "".join(parts) if not c.isspace()}
        for c in characters - self._has_token.keys():
            self._has_token[c] = bool(self.tokenizer(c, add_special_tokens=False)["input_ids"])
        return not all(self._has_token[c] for c in characters)

    def _tokenized(self, texts: list[str]) -> Iterator[tuple[Any, list[int]]]:
        plain = {"return_attention_mask": False, "return_token_type_ids": False}
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False, **plain)
        encodings = encoded.encodings or [None] * len(texts)
        return zip(encodings, map(list, encoded["input_ids"]), strict=True)

    def _changes_before(self, end: str, response: str) -> bool:
        """Return True if white space that ends a prompt has other tokens in front of a response."""
        if not (end[-1:].isspace() and response):
            return False
        (_, alone), (_, whole) = self._tokenized([end, end + response])
        return alone != whole[: len(alone)]

    def _cut(self, encoding: Any, ids: list[int], at: int, text: str) -> Rendered:
        if not at:
            return Rendered(ids)
        if encoding is None:
            alone = self.tokenizer(text[:at], add_special_tokens=False, verbose=False)["input_ids"]
            count = _num_same(list(alone), ids)
            return Rendered(ids, count, is_merged=count < len(alone))
        ends = range(len(ids))
        count = bisect_right(ends, at, key=lambda i: int(encoding.token_to_chars(i)[1]))
        start = len(text) if count == len(ids) else int(encoding.token_to_chars(count)[0])
        if start > at and combining(text[at : at + 1] or " "):
            # A normalizer has put the accent on the prompt's last character.
            return Rendered(ids, count - 1, is_merged=True)
        if start >= at:
            changes = self._changes_before(text[max(at - 8, 0) : at], text[at : at + 2])
            return Rendered(ids, count, changes)
        takes_space = ids[count] in self._takes_space
        return Rendered(ids, count + takes_space, not takes_space)


def prompt_ids(
    prompt: Text,
    tokenizer: PreTrainedTokenizerBase | TextEncoder,
    *,
    rendered: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the ids of a prompt: special tokens at the front only, BOS never twice, no EOS.

    An empty plain prompt is BOS alone, or nothing where the tokenizer has no BOS. A prompt that
    spells a control token must be `rendered`. `variables` are those of `render_chat`.

    Raises:
        ValueError: if a conversation meets a tokenizer without a chat template, or one that does
            not write all of it, or a prompt that is not rendered spells a control token.
    """
    encoder = text_encoder(tokenizer)
    if not rendered:
        encoder.check(prompt, variables)
    if isinstance(prompt, str):
        return _with_front(encoder.cut(prompt, 0).ids, encoder)
    return encoder.cut(render_chat(prompt, encoder.tokenizer, variables=variables), 0).ids


def prompt_and_responses(
    prompt: Text,
    responses: Sequence[Text],
    tokenizer: PreTrainedTokenizerBase | TextEncoder,
    *,
    rendered: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> list[Rendered]:
    """Return a prompt with each response to it, up to and including the id that ends it.

    The tokens of the prompt are the same in front of every response. Of a conversation the response
    is what the template adds to the rendered prompt, up to the first stop token behind the content,
    where a rollout stops: `<end_of_turn>` and not EOS for Gemma. Where neither the template nor the
    text has one, EOS is added.

    Args:
        prompt: a text, or a list of messages.
        responses: responses in the form of the prompt, at least one.
        tokenizer: tokenizer, or its `TextEncoder`.
        rendered: control tokens that the texts spell are tokens.
        variables: variables of the chat template, as in `render_chat`.

    Raises:
        ValueError: if the rendered prompt is not the start of the rendered conversation, the
            tokenizer has no chat template or no EOS token, or a text that is not rendered spells a
            control token.
    """
    encoder = text_encoder(tokenizer)
    if not isinstance(prompt, str):
        if not rendered:
            encoder.check(prompt, *responses, variables)
        wholes = _conversations(prompt, responses, encoder, variables)
    elif not all(isinstance(response, str) for response in responses):
        raise TypeError(
            "the prompt is plain text but a response is a conversation: make them alike"
        )
    else:
        joined = [encoder.joined(prompt, str(response)) for response in responses]
        if not rendered:
            encoder.check([text for text, _ in joined])
        wholes = [encoder.cut(*each) for each in joined]
    first = wholes[0].ids[: min(whole.num_prompt for whole in wholes)]
    num_prompt = min(_num_same(first, whole.ids) for whole in wholes)
    given = first[:num_prompt]
    if isinstance(prompt, str):
        given = _with_front(given, encoder)
    is_merged = any(whole.is_merged for whole in wholes)
    tails = [whole.ids[num_prompt:] for whole in wholes]
    ends = [_end(tail, encoder, isinstance(prompt, str)) for tail in tails]
    ended = [
        end_with_eos(tail, encoder.eos) if end is None else tail[:end]
        for tail, end in zip(tails, ends, strict=True)
    ]
    return [Rendered([*given, *tail], len(given), is_merged) for tail in ended]


def end_with_eos(ids: Sequence[int], eos: int | None) -> list[int]:
    """Return `ids` with one EOS at their end.

    Raises:
        ValueError: if the tokenizer has no EOS token.
    """
    if eos is None:
        raise ValueError("the tokenizer has no EOS token: set tokenizer.eos_token")
    return list(ids) if ids and ids[-1] == eos else [*ids, int(eos)]


def _conversations(
    prompt: Messages,
    responses: Sequence[Any],
    encoder: TextEncoder,
    variables: Mapping[str, Any] | None,
) -> list[Rendered]:
    """Return each rendered conversation, cut behind the rendered prompt."""
    start = write_chat(prompt, encoder.tokenizer, variables=variables)
    cuts = []
    for response in responses:
        whole = (*prompt, *response)
        text = render_chat(
            whole,
            encoder.tokenizer,
            variables=variables,
            add_generation_prompt=False,
            trained=range(len(prompt), len(whole)),
        )
        if not text.startswith(start):
            same = _num_same(start, text)
            at = max(same - 40, 0)
            parts = f"{start[at : same + 60]!r}, the conversation {text[at : same + 60]!r}"
            raise ChatTemplateError(
                f"the chat template does not keep the prompt as the start: the prompt has {parts}",
                "take a template whose generation prompt is what it writes before every response",
            )
        cuts.append(encoder.cut(text, len(start)))
    return cuts


def _with_front(ids: list[int], encoder: TextEncoder) -> list[int]:
    """Return the ids of a plain prompt behind what the tokenizer puts in front of a text."""
    if not ids:
        return [] if encoder.bos is None else [int(encoder.bos)]
    # A rendered prompt may spell BOS itself.
    front = encoder.front
    return list(ids) if ids[: len(front)] == front else front + ids


def _end(ids: list[int], encoder: TextEncoder, is_plain: bool) -> int | None:
    """Return how many of a response's ids go up to its first stop token behind the content."""
    end = encoder.turn_end
    if end is None or is_plain:
        return len(ids) if end is not None and ids[-1:] == [end.token_id] else None
    stops = [i for i, token in enumerate(ids) if token in (end.token_id, encoder.eos)]
    # Counted from the back: of several messages each may end with one.
    if len(stops) >= end.num_stops:
        return stops[-end.num_stops] + 1
    # A template may end a call of a tool with another token, as <|call|> and <|eom_id|> are.
    return len(ids) if ids and ids[-1] in encoder.ends_text else None


def text_encoder(tokenizer: PreTrainedTokenizerBase | TextEncoder) -> TextEncoder:
    """Return the encoder of a tokenizer, or the encoder that is given."""
    return tokenizer if isinstance(tokenizer, TextEncoder) else TextEncoder(tokenizer)


def _num_same(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many ids or characters two rows have in common at their start."""
    if first == second[: len(first)]:
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (one, other) in pairs if one != other), len(second))
