"""Texts as the tokens of a reward model with its own tokenizer.

Every text is tokenized as a whole, as the reward model's authors do it. The tokens' character
offsets say where the prompt ends, so that cutting takes from the prompt and not from the response.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from rlhf_lightning.text.decode import Completion
from rlhf_lightning.text.messages import THOUGHT
from rlhf_lightning.text.render import ChatTemplateError, first_stop, parts_missing, write_chat
from rlhf_lightning.text.tokens import TextEncoder

logger = logging.getLogger(__name__)

# Placeholder for the response, to find the text that the template writes around it.
_PLACEHOLDER = "\ue000answer\ue001"
_OTHER = "give a tokenizer with another one by scorer.tokenizer=FOLDER"


class Renderer:
    """Writes prompts and responses as a reward model's texts.

    Special tokens that a response, a message or a plain prompt spells are disarmed: a token would
    end the text early, or open a turn that was never written. What the chat template does not write
    of a conversation is named once.

    Args:
        tokenizer: tokenizer of the reward model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer: Any = tokenizer
        self._told = False
        encoder = TextEncoder(tokenizer)
        self._control = encoder.control
        # What is put in front of a text, such as BOS: a rendered prompt may spell it itself.
        self._front = "".join(self.tokenizer.convert_ids_to_tokens(encoder.front))

    def encode(self, *parts: str, add_special_tokens: bool = False) -> tuple[Any, int]:
        """Return the encoding of the parts as one text, and the length of the first part."""
        text = "".join(parts)
        encoded = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return encoded.encodings[0], len(parts[0])

    def parts(self, row: Completion) -> tuple[str, str, str]:
        """Return prompt, response and the template's closing as one text in three parts.

        Raises:
            ValueError: if a conversation meets no chat template, or one that does not write the
                response, or other text around this response than around others.
        """
        if row.messages is None:
            return self.question(row), self.response(row), ""
        turns, variables = self._turns(row, row.text), self._control.disarmed(row.variables)
        full = self._write(turns, variables)
        other = self._write(self._turns(row, _PLACEHOLDER), variables)
        before, found, after = other.partition(_PLACEHOLDER)
        fits = found and len(before) + len(after) <= len(full)
        if not (fits and full.startswith(before) and full.endswith(after)):
            told = f"write the response between {before[-40:]!r} and {after[:40]!r}"
            made = f"it made {full[-80:]!r}; {_OTHER}"
            raise ValueError(f"the reward model's chat template does not {told}: {made}")
        if not self._told:
            # A reward model may be blind to thoughts.
            others = [{k: v for k, v in message.items() if k != THOUGHT} for message in turns]
            missing = parts_missing(full, others, self.tokenizer, variables=variables)
            self._told = bool(missing)
            if missing:
                told = "the reward model's chat template does not write %s: %s, or score without it"
                logger.warning(told, ", nor ".join(missing[:3]), _OTHER)
        return before, full[len(before) : len(full) - len(after)], after

    def question(self, row: Completion) -> str:
        """Return the prompt by itself.

        Raises:
            ValueError: if a conversation meets no chat template.
        """
        if row.messages is None:
            bare = row.prompt.removeprefix(self._front)
            return bare if row.rendered else self._control.disarmed(row.prompt)
        return self._write(self._turns(row), self._control.disarmed(row.variables))

    def response(self, row: Completion) -> str:
        """Return the response by itself."""
        return self._control.disarmed(row.text)

    def _turns(self, row: Completion, *answers: str) -> list[dict[str, Any]]:
        turns = [{"role": "assistant", "content": answer} for answer in answers]
        return self._control.disarmed([*(row.messages or ()), *turns])

    def _write(self, turns: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        if not self.tokenizer.chat_template:
            fix = "give a tokenizer with one by scorer.tokenizer=FOLDER"
            raise ValueError(f"the reward model has no chat template for conversations: {fix}")
        try:
            return write_chat(
                turns, self.tokenizer, variables=variables, add_generation_prompt=False
            )
        except ChatTemplateError as error:
            roles = ", ".join(message["role"] for message in turns)
            told = f"the reward model's chat template refuses a conversation of {roles}"
            raise ValueError(f"{told}: {error.__cause__}; {_OTHER}") from error


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


@dataclass(frozen=True)
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

    renderer: Renderer
    ending: str
    max_length: int | None

    def __post_init__(self) -> None:
        """Check that there is an EOS where it ends texts."""
        if self.ending == "eos" and self.renderer.tokenizer.eos_token_id is None:
            raise ValueError(
                "the reward model's tokenizer has no EOS token: use scorer.ending=template or none"
            )

    def __call__(self, row: Completion) -> Tokens:
        """Return a row's tokens."""
        tokenizer = self.renderer.tokenizer
        before, response, after = self.renderer.parts(row)
        closed = row.finished and self.ending != "none"
        end = first_stop(after, tokenizer) if self.ending == "eos" else None
        closing = after if end is None else after[: len(after) - len(end.behind)]
        encoding, num_before = self.renderer.encode(
            before,
            response + closing * closed,
            add_special_tokens=row.messages is None,  # a chat template writes its own
        )
        ids, special = list(encoding.ids), [*encoding.special_tokens_mask, 0]
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        num_front = max(special.index(0) if 0 in special[:-1] else 0, int(ids[:1] == [bos]))
        stop = len(ids) - special[-2::-1].index(0) if 0 in special[:-1] else num_front
        offsets = encoding.offsets[num_front:stop]
        prompt_end = num_front + sum(place <= num_before for _, place in offsets)
        kept = ids[prompt_end : None if closed and self.ending == "template" else stop]
        if closed and self.ending == "eos" and end is None and kept[-1:] != [eos]:
            kept.append(int(eos))
        room = len(ids) + 1 if self.max_length is None else self.max_length - num_front
        start = max(num_front, prompt_end - max(room - len(kept), 0))  # the prompt is cut first
        read = [*ids[:num_front], *ids[start:prompt_end], *kept[:room]] or [int(eos or 0)]
        return Tokens(read, [0] * len(read), len(kept) > room)


@dataclass(frozen=True)
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

    renderer: Renderer
    input_format: str
    max_length: int | None

    def __post_init__(self) -> None:
        """Check that a response has room."""
        self._room()

    def _room(self) -> int | None:
        if self.max_length is None:
            return None
        pair = self.input_format == "pair"
        room = self.max_length - self.renderer.tokenizer.num_special_tokens_to_add(pair=pair)
        if room < 1:
            fact = "leaves no token for the response beside the special ones"
            raise ValueError(f"scorer.max_length={self.max_length} {fact}: raise it")
        return room

    def __call__(self, row: Completion) -> Tokens:
        """Return a row's tokens."""
        renderer, second, room = self.renderer, None, self._room()
        pair = self.input_format == "pair"
        if pair:
            first, _ = renderer.encode(renderer.question(row))
            second, _ = renderer.encode(renderer.response(row))
            num_response = len(second)
        else:
            alone = self.input_format == "completion"
            before, *rest = ("", renderer.response(row)) if alone else renderer.parts(row)
            first, num_before = renderer.encode(before, *rest)
            num_response = sum(stop > num_before for _, stop in first.offsets)
        if room is not None:  # the prompt is cut first, from the left
            first.truncate(max(room, num_response) - num_response * pair, direction="left")
            (second or first).truncate(room)
        encoding = renderer.tokenizer.backend_tokenizer.post_process(first, second, True)
        return Tokens(encoding.ids, encoding.type_ids, room is not None and num_response > room)
