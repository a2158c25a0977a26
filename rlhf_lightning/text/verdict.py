"""The verdict in a judge's reply: which of two responses it prefers."""

from __future__ import annotations

import json
import re

from rlhf_lightning.text.thoughts import answer_in

LETTERS = ("A", "B", "C")
# What a service with structured output is asked for.
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "verdict",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"verdict": {"type": "string", "enum": list(LETTERS)}},
            "required": ["verdict"],
            "additionalProperties": False,
        },
    },
}


def parse_verdict(reply: str, *, cut_off: bool = False) -> str | None:
    """Return the verdict of a reply behind its thoughts: A, B or C (neither); None if it has none.

    It is the letter of `{"verdict": "A"}`, or the last of `[[A]]`, `[[B]]` and `[[C]]`.

    Args:
        reply: what the judge wrote.
        cut_off: it was cut at its limit of tokens: several that differ are no verdict.
    """
    text = answer_in(reply)
    try:
        found = json.loads(text)["verdict"]
        return found if found in LETTERS else None
    except (ValueError, TypeError, KeyError, RecursionError):
        marked = re.findall(r"\[\[([ABC])\]\]", text)
        return None if not marked or (cut_off and len(set(marked)) > 1) else marked[-1]
