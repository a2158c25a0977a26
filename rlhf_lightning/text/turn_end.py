"""The token with which a chat template ends a response, where that is not EOS."""

from __future__ import annotations

import re
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlhf_lightning.text.templates import write_chat

# Placeholder for the response; a noncharacter of Unicode, which no text holds.
_ANSWER = "\ufdd0answer\ufdd0"
_EXCHANGE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER})


@dataclass(frozen=True)
class TurnEnd:
    r"""The text that a template writes behind the content of a response.

    Args:
        token: the first stop token there: `<end_of_turn>` of Gemma, `<|end|>` of Phi 3.
        token_id: id of the token.
        behind: text that follows the token: a line break, or EOS too.
        num_stops: number of stop tokens behind the content, this one included.
    """

    token: str
    token_id: int
    behind: str
    num_stops: int


def turn_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnd | None:
    """Return how the chat template ends a response; None without a template or an end token.

    It is found by rendering an exchange: the first special token behind the response, or else the
    first added one.
    """
    if not tokenizer.chat_template:
        return None
    try:
        text = write_chat(_EXCHANGE, tokenizer, add_generation_prompt=False)
    except ValueError:  # made for other conversations
        return None
    _, found, after = text.rpartition(_ANSWER)
    return first_stop(after, tokenizer) if found else None


def first_stop(text: str, tokenizer: PreTrainedTokenizerBase) -> TurnEnd | None:
    """Return the first stop token in what a template writes behind a response, or None."""
    added = {t.content: (i, t.special) for i, t in tokenizer.added_tokens_decoder.items()}
    special = [content for content, (_, special) in added.items() if special]
    for candidates in (special, list(added)):
        match = next(iter(_all_of(candidates, text)), None)
        if match is not None:
            stops = {match.group(), str(tokenizer.eos_token)}
            return TurnEnd(
                token=match.group(),
                token_id=int(added[match.group()][0]),
                behind=text[match.end() :],
                num_stops=sum(m.group() in stops for m in _all_of(added, text)),
            )
    return None


def _all_of(contents: object, text: str) -> list[re.Match[str]]:
    longest_first = sorted(filter(None, contents), key=len, reverse=True)  # type: ignore[call-overload]
    pattern = "|".join(map(re.escape, longest_first))
    return list(re.finditer(pattern, text)) if pattern else []
