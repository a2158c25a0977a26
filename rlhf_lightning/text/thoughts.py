"""A judge's reply without its thoughts."""

from __future__ import annotations

import re

from rlhf_lightning.text.letters import any_of

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
