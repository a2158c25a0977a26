"""Ratings of the two responses in a judge's reply: which one is rated higher."""

from __future__ import annotations

import re

from rlhf_lightning.text.labels import LABEL, any_of, letter_of

_RATED = re.compile(
    rf"({LABEL})(?:'s)?"
    rf"(?:\s+{any_of('scored? rating gets receives scores deserves earns is rated an? of')}){{0,3}}"
    r"[\s:=(\[\u2013\u2014-]*(\d{1,3}(?:\.\d+)?)(?![\d%]*\.?\d)(?:\s*(?:/|out\s+of)\s*\d+)?+"
    rf"(?!\s*(?!{any_of('points? pts stars? and vs while whereas but versus')}\b)[a-z])"
)
SCORE = r"(\d{1,3}(?:\.\d+)?)(?:\s?/\s?\d+)?"
_TWO_NUMBERS = re.compile(rf"(?i:scores?)?\W*{SCORE}[\s,;]+(?:vs\.?\s+)?{SCORE}\W*")
_RATING_FIRST = re.compile(rf"(\d+(?:\.\d+)?)(?:\s*/\s*\d+)?\s+(?:for|to)\s+({LABEL})")
_RANKED = re.compile(r"(?i:\branks?\b|\b1\s*(?:is|=)\s*(?:the\s+)?best|lower\s+is\s+better)")
TOTAL = re.compile(r"(?i:overall|total|final|总)")


def by_ratings(lines: list[str]) -> str | None:
    """Return the response that is rated higher; of several ratings each, the overall one counts."""
    if any(map(_RANKED.search, lines)):
        return None  # 1 may be the best or the worst
    if lines and (two := _TWO_NUMBERS.fullmatch(lines[0])):
        rated = {"A": {float(two.group(1))}, "B": {float(two.group(2))}}
    else:
        rated = _ratings(lines)
        if max(map(len, rated.values())) > 1:
            said = (part for line in lines for part in re.split(r"[.;] ", line))
            rated = _ratings([part for part in said if TOTAL.search(part)])
    if any(len(each) != 1 for each in rated.values()):
        return None
    first, second = (next(iter(rated[letter])) for letter in "AB")
    return "A" if first > second else "B" if second > first else "C"


def _ratings(lines: list[str]) -> dict[str, set[float]]:
    found: dict[str, set[float]] = {"A": set(), "B": set()}
    lines = [_RATING_FIRST.sub(r"\2: \1", line) for line in lines]
    for label, number in (each for line in lines for each in _RATED.findall(line)):
        found.setdefault(letter_of(label), set()).add(float(number))
    found.pop("C", None)
    return found
