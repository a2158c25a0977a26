"""Ratings of the two responses in a judge's reply: which one is rated higher."""

from __future__ import annotations

import re
from typing import Any

from rlhf_lightning.text.letters import LABEL, any_of, letter_of

MOST_OF_A_HEADING, MOST_BEFORE = 40, 80  # characters
_NUMBER = r"\d{1,3}(?:\.\d+|,\d{1,2}(?!\d))?"
_RATED = re.compile(
    rf"(?P<label>{LABEL})(?:'s)?(?P<words>(?:\s+"
    rf"{any_of('scored? rating gets receives scores deserves earns is rated an? of')}){{0,3}})"
    rf"(?P<gap>[\s:=(\[\u2013\u2014\u2212-]*)(?P<number>{_NUMBER})(?!\+|[\d%]*[.,]?\d)"
    r"(?:\s*(?:/|out\s+of)\s*(?P<most>\d+)|(?P<percent>%))?+"
    rf"(?!\s*(?!{any_of('points? pts stars? and vs while whereas but versus')}\b)[a-z])"
)
SCORE = r"(-?\d{1,3}(?:\.\d+)?)(?:\s?/\s?\d+)?"
_TWO_NUMBERS = re.compile(rf"(?i:scores?)?[^\w-]*{SCORE}[\s,;]+(?:vs\.?\s+)?{SCORE}\W*")
_RATING_FIRST = re.compile(rf"(-?{_NUMBER}(?:\s*/\s*\d+)?)\s+(?:for|to)\s+({LABEL})")
# More of these is no better.
_COUNTED = re.compile(
    "(?i:error|mistake|issue|flaw|fault|bug|typo|problem|violation|hallucination|penalt|weakness"
    r"|harmful|toxic|verbos|\brisk|length|\bword|token|character|sentence|latency|\bcosts?\b|\btime\b)"
)
_SCORED = re.compile(r"\W*(?i:(?:overall|total|final)?\s*(?:score|rating))\s*[:=]")
_RANKED = re.compile(r"(?i:\branks?\b|\b1\s*(?:is|=)\s*(?:the\s+)?best|lower\s+is\s+better)")
TOTAL = re.compile(r"(?i:overall|total|final|总)")

_SHARE = r"(0?\.\d+|\d+(?:\.\d+)?\s*%)"
_CHANCE = re.compile(
    rf"\)?(?:\s*[:=]|\s+is|\s+with\s+(?:an?\s+)?probability(?:\s+of)?)?\s*{_SHARE}"
)
_CHANCE_OF = re.compile(
    rf"{_SHARE}\s+(?:chance|probability|likelihood)\s+(?:that|of|for)\W*(?:\w+\W+)?$"
)
_DENIED = re.compile(r"\s*[:=\u2013-]\s*(?i:false|untrue|(?:no|low)(?=\s*(?:$|[.,;)\n])))")


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
    """Return each response's ratings, as parts of the most there is where that differs."""
    said: list[tuple[str, set[float], int | None]] = []
    heading, owner = "", None
    for line in lines:
        if named := re.fullmatch(rf"\W*({LABEL})\W*", line):
            owner = named[1]
        elif owner and (scored := _SCORED.match(line)):
            line = f"{owner}: {line[scored.end() :]}"
        line = _RATING_FIRST.sub(r"\2: \1", line)
        rated = list(_RATED.finditer(line))
        if not rated:
            is_heading = len(line) < MOST_OF_A_HEADING and line.rstrip()[-1:] not in ".!?"
            heading = line if is_heading else ""
        for found in rated:
            near = line[max(0, found.start() - MOST_BEFORE) : found.start()]
            before = heading + re.split(r"[.;]\s", near)[-1]
            most = int(found["most"] or (100 if found["percent"] else 0)) or None
            if most is not None or not _COUNTED.search(before):
                said.append((letter_of(found["label"]), _signed(found), most))
    tops = {most for _, _, most in said}
    ratings: dict[str, set[float]] = {"A": set(), "B": set()}
    for label, numbers, most in said:
        if len(tops - {None}) > 1:
            numbers = {round(each / most, 6) for each in numbers} if most else set()
        ratings.setdefault(label, set()).update(numbers)
    ratings.pop("C", None)
    return ratings


def _signed(found: re.Match[str]) -> set[float]:
    """Return a rating's number; both of them where a dash may be a sign or not."""
    number, gap = float(found["number"].replace(",", ".")), found["gap"]
    if not re.search(r"[\s:=(\[][\u2013\u2212-]$", gap):
        return {number}
    named = found["words"] or re.search(r"[:=(\[]", gap)
    return {-number} if named else {number} if found["most"] else {number, -number}


def rating_of(key: str, value: Any) -> Any:
    """Return a number that is higher for a better response: for ranks 1 is the best; or none."""
    if _COUNTED.search(key):
        return ""
    return 999 - value if "rank" in key.lower() and is_number(value) else value


def is_number(value: Any) -> bool:
    """Say whether a value may be a rating."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1000


def is_doubted(before: str, after: str) -> bool:
    """Return True if the words around "A is better" deny it: "no", "false", or less than 50 %."""
    if _DENIED.match(after):
        return True
    found = _CHANCE.match(after) or _CHANCE_OF.search(before)
    if found is None:
        return False
    share = found.group(1)
    return float(share.rstrip("% ")) < (50 if "%" in share else 0.5)
