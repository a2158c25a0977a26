"""Thoughts of a policy's response, and of a judge's reply."""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal, NamedTuple

logger = logging.getLogger(__name__)

Thoughts = Literal["keep", "drop"]
# Begin and end of thoughts, as the chat templates of models that think write them.
_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis", "<|channel|>final<|message|>"),
)


class Exchange(NamedTuple):
    """A prompt and the response to it."""

    prompt: str
    response: str


def behind_thoughts(response: str, prompt: str = "") -> str | None:
    """Return a response behind its thoughts, "" where they do not end; None if it has none.

    They begin with the response or at the end of its prompt, as chat templates mark them.
    """
    for begin, end in _MARKS:
        before, ended, behind = response.rpartition(end)
        opened = response.lstrip().startswith(begin) or prompt.rstrip().endswith(begin)
        if opened or (ended and begin not in before):  # a prompt that is not known opened them
            return behind.lstrip() if ended else ""
    return None


def answer_in(response: str, prompt: str = "") -> str:
    """Return a response behind its thoughts, the whole of one that has none."""
    answer = behind_thoughts(response, prompt)
    return response if answer is None else answer


def marks_thoughts(token: str) -> bool:
    """Return whether a token is one of the marks of thoughts, or a part of one."""
    return any(token in mark for both in _MARKS for mark in both)


def opened_by(prompt: str) -> str:
    """Return what opens thoughts at the end of a prompt, "" where nothing does."""
    return next((begin for begin, _ in _MARKS if prompt.rstrip().endswith(begin)), "")


def shown(prompt: str, response: str, thoughts: Thoughts, setting: str) -> Exchange:
    """Return prompt and response as a reward model, a judge or a rater is shown them.

    Args:
        prompt: the prompt as the policy sees it; "" where that is not known.
        response: text of the response.
        thoughts: `drop` leaves out the response's thoughts and what opens them in the prompt.
        setting: its name, for the line that is logged once where thoughts are left out.
    """
    answer = behind_thoughts(response, prompt)
    if thoughts == "keep" or answer is None:
        return Exchange(prompt, response)
    _tell(setting)
    opened = opened_by(prompt)
    return Exchange(prompt.rstrip().removesuffix(opened) if opened else prompt, answer)


@cache
def _tell(setting: str) -> None:
    way = f": {setting}=keep shows them too" if setting else ""
    logger.warning("responses are shown without their thoughts%s", way)
