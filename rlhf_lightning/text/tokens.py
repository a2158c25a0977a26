"""Texts to token ids: prompts, and answers up to and including the token that ends them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_lightning.text.control_tokens import ControlTokens, control_tokens
from rlhf_lightning.text.messages import Text
from rlhf_lightning.text.templates import ChatTemplateError, render_chat, write_chat
from rlhf_lightning.text.turn_end import TurnEnd, turn_end


class MemoTokenizer:
    """A tokenizer that tokenizes many texts in one go, twice as fast as one by one, and remembers.

    It stands in for `tokenizer` in the functions below; all else is passed on.

    Args:
        tokenizer: the tokenizer.
        prompts: will be tokenized; the plain ones are tokenized here, each once.
        answers: the same of answers.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Iterable[Text] = (),
        answers: Iterable[Text] = (),
    ) -> None:
        """Tokenize the texts."""
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, bool], dict[str, list[int]]] = {}
        # The tokenizer looks its special tokens up by name each time.
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = tokenizer.eos_token_id
        self.turn_end = turn_end(tokenizer)
        self.control = control_tokens(tokenizer)
        for texts, add_special_tokens in ((prompts, True), (answers, False)):
            plain = sorted({text for text in texts if isinstance(text, str)})
            if plain:
                self._remember(plain, add_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, **options: Any
    ) -> dict[str, list[int]]:
        """Return `input_ids` and `special_tokens_mask` of a text; further options do not matter."""
        if (text, add_special_tokens) not in self._known:
            self._remember([text], add_special_tokens)
        return self._known[text, add_special_tokens]

    def _remember(self, texts: list[str], add_special_tokens: bool) -> None:
        encoding = self._tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            return_special_tokens_mask=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        rows = zip(texts, encoding["input_ids"], encoding["special_tokens_mask"], strict=True)
        for text, ids, special in rows:
            known = {"input_ids": ids, "special_tokens_mask": special}
            self._known[text, add_special_tokens] = known


def prompt_ids(
    prompt: Text,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rendered: bool = False,
    variables: Mapping[str, Any] | None = None,
    losses: list[str] | None = None,
) -> list[int]:
    """Return the ids of a prompt: special tokens at the front only, BOS never twice, no EOS.

    An empty plain prompt is BOS alone, or nothing where the tokenizer has no BOS. Special tokens
    that the prompt spells are text, unless it is `rendered`. `variables` and `losses` are those of
    `render_chat`.

    Raises:
        ValueError: if a conversation meets a tokenizer without a chat template, or one that does
            not write all of it.
    """
    control = _control(tokenizer)
    guarded = not rendered and control.spelled_in(prompt, variables or {})
    if not isinstance(prompt, str):
        if guarded:
            prompt, variables = control.hide(prompt), control.hidden(variables)
        text = render_chat(prompt, tokenizer, variables=variables, losses=losses)
        return control.encode_rendered(text) if guarded else _tokenize(text, tokenizer)
    if guarded:
        encoding: Any = control.encode(prompt, add_special_tokens=True)
    else:
        encoding = tokenizer(prompt, return_special_tokens_mask=True, verbose=False)
    ids, special = list(encoding["input_ids"]), list(encoding["special_tokens_mask"])
    if all(special):
        bos = tokenizer.bos_token_id
        return [] if bos is None else [int(bos)]
    num_front = special.index(0)
    num_back = special[::-1].index(0)
    front, text = ids[:num_front], ids[num_front : len(ids) - num_back]
    # A rendered prompt may spell BOS itself.
    return text if text[:num_front] == front else front + text


def answer_ids(
    prompt: Text,
    answer: Text,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rendered: bool = False,
    variables: Mapping[str, Any] | None = None,
    losses: list[str] | None = None,
) -> list[int]:
    """Return the ids that follow the prompt's, up to and including the one that ends the answer.

    For a conversation: what the template adds to the rendered prompt, up to the first stop token
    behind the content, where a rollout stops: `<end_of_turn>` and not EOS for Gemma. Where neither
    the template nor the text has one, EOS is added. Where the tokenizer would
    merge the last characters of the prompt with the first of the answer, the answer is tokenized
    on its own, because that is the boundary at which a policy starts to generate. Special tokens
    that the texts spell are text, unless they are `rendered`.

    Raises:
        ValueError: if the rendered prompt is not the start of the rendered conversation, or the
            tokenizer has no chat template or no EOS token.
    """
    control = _control(tokenizer)
    if isinstance(answer, str):
        guarded = not rendered and control.spelled_in(answer)
        return end_with_eos(
            control.encode(answer, add_special_tokens=False)["input_ids"]
            if guarded
            else _tokenize(answer, tokenizer),
            tokenizer,
        )
    if isinstance(prompt, str):
        raise TypeError(
            "the prompt is plain text but its response is a conversation: make them alike"
        )
    guarded = not rendered and control.spelled_in(prompt, answer, variables or {})
    if guarded:
        prompt, answer = control.hide(prompt), control.hide(answer)
        variables = control.hidden(variables)
    start = write_chat(prompt, tokenizer, variables=variables)
    whole = (*prompt, *answer)
    full = render_chat(
        whole,
        tokenizer,
        add_generation_prompt=False,
        variables=variables,
        learnt=range(len(prompt), len(whole)),
        losses=losses,
    )
    if not full.startswith(start):
        raise _not_a_prefix(control.reveal(start), control.reveal(full))

    def encode(text: str) -> list[int]:
        return control.encode_rendered(text) if guarded else _tokenize(text, tokenizer)

    given, ids = encode(start), encode(full)
    tail = ids[len(given) :] if ids[: len(given)] == given else encode(full[len(start) :])
    return end_with_eos(tail, tokenizer) if (end := _end(tail, tokenizer)) is None else tail[:end]


def end_with_eos(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return `ids` with one EOS at their end.

    Raises:
        ValueError: if the tokenizer has no EOS token.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ValueError("the tokenizer has no EOS token: set tokenizer.eos_token")
    return list(ids) if ids and ids[-1] == eos else [*ids, int(eos)]


def _end(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return how many of an answer's ids go up to its first stop token behind the content."""
    end = _turn_end(tokenizer)
    if end is None:
        return None
    stops = [i for i, token in enumerate(ids) if token in (end.token_id, tokenizer.eos_token_id)]
    # Counted from the back: of several messages each may end with one.
    return stops[-end.num_stops] + 1 if len(stops) >= end.num_stops else None


def _control(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    known = isinstance(tokenizer, MemoTokenizer)
    return tokenizer.control if known else control_tokens(tokenizer)


def _turn_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnd | None:
    return tokenizer.turn_end if isinstance(tokenizer, MemoTokenizer) else turn_end(tokenizer)


def _tokenize(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _not_a_prefix(start: str, full: str) -> ChatTemplateError:
    same = next((i for i, (a, b) in enumerate(zip(start, full, strict=False)) if a != b), len(full))
    at = max(same - 40, 0)
    return ChatTemplateError(
        "the chat template does not keep the prompt as the start of the whole conversation, so it "
        f"is not known which tokens are the response. They part after {same} characters: the "
        f"prompt has ...{start[at : same + 60]!r}, the conversation ...{full[at : same + 60]!r}",
        "take a template whose generation prompt is what it writes before every response",
    )
