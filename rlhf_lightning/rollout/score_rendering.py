"""Prompts and answers as texts, under the chat template of a model that is not the policy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.batches import CONVERSATION
from rlhf_lightning.models.template_date import with_fixed_date
from rlhf_lightning.rollout.score import Answers

PLAIN = "plain"
BETWEEN_TURNS = "\n\n"
# Stands where the answer goes while the template is asked what it writes around it.
_PLACEHOLDER = "\ue000answer\ue001"


class AnswerText(NamedTuple):
    """One answer as text.

    Args:
        prompt: as the policy sees it: plain, or a conversation as the policy's template writes it.
        messages: the conversation that the answer ends; a plain prompt has none.
        completion: without special tokens.
        finished: it ended by itself.
    """

    prompt: str
    messages: list[dict[str, str]] | None
    completion: str
    finished: bool


def answer_texts(answers: Answers) -> list[AnswerText]:
    """Return the answers as texts, row by row."""
    columns = answers.prompts.columns
    conversations = columns.get(CONVERSATION, ("",) * len(answers.prompts))
    rows = zip(
        columns["prompt"],
        conversations,
        answers.completions,
        answers.finished.tolist(),
        strict=True,
    )
    return [
        AnswerText(prompt, json.loads(messages) if messages else None, completion, finished)
        for prompt, messages, completion, finished in rows
    ]


@dataclass(frozen=True)
class Parts:
    """A text in three: what stands before the answer, the answer, what the template closes with."""

    before: str
    answer: str
    after: str


class Renderer:
    """Writes prompts and answers as a reward model's texts.

    Text of an answer or a message that spells one of the tokenizer's special tokens loses it: it
    would end the text early, or open a turn that nobody has spoken.

    Args:
        tokenizer: the reward model's.
        chat_template: see `TextRewardModelHparams`.

    Raises:
        ValueError: if the template's file does not exist.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> None:
        self.tokenizer: Any = tokenizer
        self.plain = chat_template == PLAIN
        self.template = None if self.plain else _read_template(chat_template)
        added = (str(t) for t in self.tokenizer.added_tokens_decoder.values() if t.special)
        special = {*added, *self.tokenizer.all_special_tokens, _PLACEHOLDER}
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)))

    def parts(self, row: AnswerText) -> Parts:
        """Return prompt, answer and closing marks as one text in three parts.

        Raises:
            ValueError: if a conversation meets no chat template, or one that writes something else
                around this answer than around others.
        """
        completion = self._without_special(row.completion)
        if row.messages is None:
            return Parts(row.prompt, completion, "")
        if self.plain:
            return Parts(self.question(row) + BETWEEN_TURNS, completion, "")
        before, _, after = self._render([*row.messages, _turn(_PLACEHOLDER)]).partition(
            _PLACEHOLDER
        )
        full = self._render([*row.messages, _turn(completion)])
        if not full.startswith(before) and full.startswith(self.question(row)):
            # What a template writes in front of an answer may depend on the answer.
            before = self.question(row)
        fits = len(before) + len(after) <= len(full)
        if not (fits and full.startswith(before) and full.endswith(after)):
            raise ValueError(
                "the reward model's chat template does not write the answer between "
                f"{before[-40:]!r} and {after[:40]!r} as it does for others: it made "
                f"{full[-80:]!r}; give another one with scorer.chat_template=FILE"
            )
        return Parts(before, full[len(before) : len(full) - len(after)], after)

    def question(self, row: AnswerText) -> str:
        """Return the prompt by itself.

        Raises:
            ValueError: if a conversation meets no chat template.
        """
        if row.messages is None:
            return row.prompt
        if self.plain:
            return BETWEEN_TURNS.join(message["content"] for message in row.messages)
        return self._render(row.messages)

    def answer(self, row: AnswerText) -> str:
        """Return the answer by itself."""
        return self._without_special(row.completion)

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        if self.template is None and not self.tokenizer.chat_template:
            raise ValueError(
                "the prompts are conversations but the reward model's tokenizer has no chat "
                "template: give one with scorer.chat_template=FILE, or scorer.chat_template=plain "
                "to write the turns with an empty line between them"
            )
        conversation = [dict(message) for message in messages]
        for message in conversation:
            if message["content"] != _PLACEHOLDER:
                message["content"] = self._without_special(message["content"])
        try:
            text = self.tokenizer.apply_chat_template(
                conversation, chat_template=self.template, tokenize=False
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in conversation)
            raise ValueError(
                f"the reward model's chat template refuses a conversation of {roles}: {error}; "
                "give another one with scorer.chat_template=FILE"
            ) from error
        return str(text)

    def _without_special(self, text: str) -> str:
        while (shorter := self._special.sub("", text)) != text:
            text = shorter  # what is left may spell another one
        return text


def _read_template(chat_template: str | None) -> str | None:
    if chat_template is None:
        return None
    file = Path(chat_template)
    if not file.is_file():
        raise ValueError(
            f"scorer.chat_template={chat_template} is neither a file nor 'plain': give the path of "
            "a Jinja template"
        )
    return with_fixed_date(file.read_text(encoding="utf-8"))


def _turn(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}
