"""Thoughts of a policy's response, and of a judge's reply."""

from __future__ import annotations

import logging
import re
from functools import cache
from typing import Literal, NamedTuple

from rlhf_lightning.text.letters import any_of

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
_THOUGHTS = (
    "(?:"
    + any_of(
        "think thinking thoughts? reason reasoning analysis reflection scratchpad rationale "
        "explanation critique justification cot antthinking inner internal deliberation planning"
    )
    + r"(?:[\s_-](?i:process|monologue|thoughts?|reasoning))?|(?i:chain[\s_-]of[\s_-]thoughts?))"
)
_THINKING = re.compile(
    rf"[<\[◁]\|?\s*((?i:/|END_(?:OF_)?))?(?i:(?:START|BEGIN)_(?:OF_)?)?(?:\w+:)?{_THOUGHTS}\s*\|?[>\]▷]"
)
_TURN_END = re.compile(  # what is behind it was made up
    r"<[|\uff5c](?:im_end|eot_id|endoftext|end|return|end▁of▁sentence)[|\uff5c]>|</s>|<end_of_turn>"
    r"|\n(?:Human|User):(?=[\s\S]*\n(?:Assistant|AI):)|\n#{2,4} ?Instruction:"
)
_FINAL = re.compile(
    r"<\|channel\|>\s*final\b.*?<\|message\|>|assistantfinal|(?i:here is my response:)", re.S
)
_UNFINISHED = re.compile(r"\s*analysis(?=[A-Z\"'])|(?i:here is my thought process)")


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
    asked = prompt.rstrip()
    opened = next((begin for begin, _ in _MARKS if asked.endswith(begin)), None)
    return Exchange(prompt if opened is None else asked.removesuffix(opened), answer)


@cache
def _tell(setting: str) -> None:
    way = f": {setting}=keep shows them too" if setting else ""
    logger.warning("responses are shown without their thoughts%s", way)


def without_thoughts(reply: str) -> str | None:
    """Return the reply's turn without its thoughts; None where they do not end."""
    said = _behind_thoughts(reply)
    turns = [each for each in _TURN_END.split(said or "") if each.strip()]
    return None if said is None else turns[0] if turns else ""


def _behind_thoughts(reply: str) -> str | None:
    if _FINAL.search(reply):
        return _FINAL.split(reply)[-1]
    if _UNFINISHED.match(reply) or "<|channel|>" in reply:
        return None
    text = re.sub(r"<\|channel>\s*thought", "<think>", reply).replace("<channel|>", "</think>")
    kept, depth, end = "", 0, 0
    for mark in _THINKING.finditer(text):
        if mark.group(1) is None:
            kept += "" if depth else text[end : mark.start()]
            depth += 1
        else:  # without an opening mark the prompt held it: all before are thoughts
            kept, depth = (kept, depth - 1) if depth else ("", 0)
        end = mark.end()
    return None if depth else kept + text[end:]
