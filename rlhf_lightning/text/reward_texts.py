"""Texts as the tokens of a reward model with its own tokenizer.

Every text is tokenized as a whole, as the reward model's authors do it. The tokens' character
offsets say where the prompt ends, so that cutting takes from the prompt and not from the response.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from rlhf_lightning.text.control_tokens import ControlTokens
from rlhf_lightning.text.fidelity import lost
from rlhf_lightning.text.forms import REFUSALS, THOUGHT, apply, form_of
from rlhf_lightning.text.template_date import with_fixed_date
from rlhf_lightning.text.turn_end import first_stop

logger = logging.getLogger(__name__)

PLAIN = "plain"
BETWEEN_TURNS = "\n\n"
# Placeholder for the response, to find the text that the template writes around it.
_PLACEHOLDER = "\ue000answer\ue001"


class ResponseText(NamedTuple):
    """One response as text.

    Args:
        prompt: the prompt as the policy sees it: plain, or rendered by the policy's template.
        messages: the conversation that the response ends; a plain prompt has none.
        completion: text of the response, as the policy wrote it.
        finished: whether it ended by itself.
        rendered: special tokens that a plain prompt spells are tokens.
        variables: further variables of a chat template, such as `tools`.
    """

    prompt: str
    messages: list[dict[str, Any]] | None
    completion: str
    finished: bool
    rendered: bool = False
    variables: Mapping[str, Any] = MappingProxyType({})


class Renderer:
    """Writes prompts and responses as a reward model's texts.

    Special tokens that a response, a message or a plain prompt spells are disarmed: a token would
    end the text early, or open a turn that was never written. What the chat template does not write
    of a conversation is named once.

    Args:
        tokenizer: tokenizer of the reward model.
        chat_template: file of a template or `plain`, see `TextRewardModelHparams`.

    Raises:
        ValueError: if the template's file does not exist.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str | Path | None
    ) -> None:
        self.tokenizer: Any = tokenizer
        self.plain = chat_template == PLAIN
        self._writer: Any = tokenizer
        if chat_template is not None and not self.plain:
            self._writer = copy(tokenizer)
            self._writer.chat_template = _read_template(chat_template)
        self._told = False
        self._control = ControlTokens(tokenizer)

    def encode(self, *parts: str, add_special_tokens: bool = False) -> tuple[Any, int]:
        """Return the encoding of the parts as one text, and the length of the first part."""
        text = "".join(parts)
        encoded = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return encoded.encodings[0], len(parts[0])

    def parts(self, row: ResponseText) -> tuple[str, str, str]:
        """Return prompt, response and the template's closing as one text in three parts.

        Raises:
            ValueError: if a conversation meets no chat template, or one that does not write the
                response, or other text around this response than around others.
        """
        if row.messages is None:
            return self.question(row), self.response(row), ""
        if self.plain:
            return self.question(row) + BETWEEN_TURNS, self.response(row), ""
        before, found, after = self._render(row, _turn(_PLACEHOLDER)).partition(_PLACEHOLDER)
        full = self._render(row, _turn(row.completion))
        fits = found and len(before) + len(after) <= len(full)
        if not (fits and full.startswith(before) and full.endswith(after)):
            raise ValueError(
                "the reward model's chat template does not write the response between "
                f"{before[-40:]!r} and {after[:40]!r} as it does for others: it made "
                f"{full[-80:]!r}; give another one with scorer.chat_template=FILE"
            )
        if not self._told:
            self._tell_of_losses(row, full)
        return before, full[len(before) : len(full) - len(after)], after

    def question(self, row: ResponseText) -> str:
        """Return the prompt by itself.

        Raises:
            ValueError: if a conversation meets no chat template.
        """
        if row.messages is None:
            return row.prompt if row.rendered else self._control.disarmed(row.prompt)
        if self.plain:
            return BETWEEN_TURNS.join(self._control.disarmed(m["content"]) for m in row.messages)
        return self._render(row)

    def response(self, row: ResponseText) -> str:
        """Return the response by itself."""
        return self._control.disarmed(row.completion)

    def _render(self, row: ResponseText, *response: Mapping[str, str]) -> str:
        if not self._writer.chat_template:
            raise ValueError(
                "the reward model's tokenizer has no chat template, and prompts are conversations: "
                "set scorer.chat_template=FILE, or =plain for turns with empty lines between"
            )
        conversation = self._control.disarmed([*(row.messages or ()), *response])
        return self._write(conversation, self._control.disarmed(row.variables))

    def _write(
        self, conversation: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        try:
            return apply(self._writer, conversation, variables)
        except REFUSALS as error:
            roles = ", ".join(message["role"] for message in conversation)
            raise ValueError(
                f"the reward model's chat template refuses a conversation of {roles}: {error}; "
                "give another one with scorer.chat_template=FILE"
            ) from error

    def _tell_of_losses(self, row: ResponseText, text: str) -> None:
        turns = self._control.disarmed([*(row.messages or ()), _turn(row.completion)])
        # A reward model may be blind to thoughts.
        said = [{k: v for k, v in message.items() if k != THOUGHT} for message in turns]
        variables = self._control.disarmed(row.variables)
        missing = lost(said, variables, text, form_of(self._writer), self._write)
        if missing:
            self._told = True
            logger.warning(
                "the reward model's chat template does not write %s: such responses are scored "
                "without it. Another template is given with scorer.chat_template=FILE",
                ", nor ".join(missing[:3]),
            )


def _read_template(chat_template: str | Path) -> str:
    file = Path(chat_template)
    if not file.is_file():
        raise ValueError(
            f"scorer.chat_template={chat_template} is neither a file nor 'plain': give the path of "
            "a Jinja template"
        )
    return with_fixed_date(file.read_text(encoding="utf-8"))


def _turn(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


class Tokens(NamedTuple):
    """The token ids that a reward model reads.

    Args:
        ids: token ids of the text.
        type_ids: 0 for the first text of a pair, 1 for the second.
        over_long: the response alone did not fit: its end is missing, EOS included.
    """

    ids: list[int]
    type_ids: list[int]
    over_long: bool


class LastTokenInputs:
    """Tokens for a decoder whose score is read at the last one.

    Args:
        renderer: renderer of the texts.
        ending: see `TextRewardModelHparams`. A response that did not finish gets no ending: its
            score is read at its last token, as for a packed reward model.
        max_length: longest text in tokens, None for any.

    Raises:
        ValueError: if `ending` is `eos` and the tokenizer has no EOS token.
    """

    def __init__(self, renderer: Renderer, *, ending: str, max_length: int | None) -> None:
        self.renderer = renderer
        self.tokenizer = renderer.tokenizer
        self.ending = ending
        self.max_length = max_length
        if ending == "eos" and self.tokenizer.eos_token_id is None:
            raise ValueError(
                "the reward model's tokenizer has no EOS token: use scorer.ending=template or none"
            )

    def __call__(self, rows: Sequence[ResponseText]) -> list[Tokens]:
        """Return each row's tokens."""
        return [self._tokens(row) for row in rows]

    def _tokens(self, row: ResponseText) -> Tokens:
        before, response, after = self.renderer.parts(row)
        closed = row.finished and self.ending != "none"
        end = first_stop(after, self.tokenizer) if self.ending == "eos" else None
        closing = after if end is None else after[: len(after) - len(end.behind)]
        encoding, num_before = self.renderer.encode(
            before,
            response + closing * closed,
            # A chat template writes its special tokens itself.
            add_special_tokens=row.messages is None or self.renderer.plain,
        )
        ids, special = list(encoding.ids), [*encoding.special_tokens_mask, 0]
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        num_front = max(special.index(0) if 0 in special[:-1] else 0, int(ids[:1] == [bos]))
        stop = len(ids) - special[-2::-1].index(0) if 0 in special[:-1] else num_front
        prompt_end = num_front + sum(
            place <= num_before for _, place in encoding.offsets[num_front:stop]
        )
        kept = [
            *ids[prompt_end:stop],
            *(ids[stop:] if closed and self.ending == "template" else ()),
        ]
        if closed and self.ending == "eos" and end is None and kept[-1:] != [eos]:
            kept.append(int(eos))
        room = len(ids) + 1 if self.max_length is None else self.max_length - num_front
        start = max(num_front, prompt_end - max(room - len(kept), 0))  # the prompt is cut first
        read = [*ids[:num_front], *ids[start:prompt_end], *kept[:room]] or [int(eos or 0)]
        return Tokens(read, [0] * len(read), len(kept) > room)


class ClassifierInputs:
    """Tokens for a classifier that is called unchanged: its tokenizer's text or pair of texts.

    Such a text does not show whether the response finished.

    Args:
        renderer: renderer of the texts.
        input_format: form of the input, see `TextRewardModelHparams`.
        max_length: longest input in tokens, special ones included, None for any.

    Raises:
        ValueError: if `max_length` leaves no token for the response.
    """

    def __init__(self, renderer: Renderer, *, input_format: str, max_length: int | None) -> None:
        self.renderer = renderer
        self.tokenizer = renderer.tokenizer
        self.pair = input_format == "pair"
        self.input_format = input_format
        self.max_length = max_length
        num_special = self.tokenizer.num_special_tokens_to_add(pair=self.pair)
        self.room = None if max_length is None else max_length - num_special
        if self.room is not None and self.room < 1:
            raise ValueError(
                f"scorer.max_length={max_length} leaves no token for the response: {num_special} "
                "are special ones"
            )

    def __call__(self, rows: Sequence[ResponseText]) -> list[Tokens]:
        """Return each row's tokens."""
        return [self._tokens(row) for row in rows]

    def _tokens(self, row: ResponseText) -> Tokens:
        renderer, second = self.renderer, None
        if self.pair:
            first, _ = renderer.encode(renderer.question(row))
            second, _ = renderer.encode(renderer.response(row))
            num_response = len(second)
        else:
            alone = self.input_format == "completion"
            before, *rest = ("", renderer.response(row)) if alone else renderer.parts(row)
            first, num_before = renderer.encode(before, *rest)
            num_response = sum(stop > num_before for _, stop in first.offsets)
        over_long = self.room is not None and num_response > self.room
        if self.room is not None:  # the prompt is cut first, from the left
            kept = max(self.room, num_response)
            first.truncate(kept - num_response * self.pair, direction="left")
            (second or first).truncate(self.room)
        encoding = self.tokenizer.backend_tokenizer.post_process(first, second, True)
        return Tokens(encoding.ids, encoding.type_ids, over_long)
