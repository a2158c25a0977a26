"""The names that a judge gives the two responses: "Response A", "the second one", `score_b`."""

from __future__ import annotations

import re


def any_of(words: str) -> str:
    """Return what matches one of the words, in any case; `_` is white space."""
    return "(?i:" + "|".join(words.split()).replace("_", r"\s+") + ")"


NOUN = any_of(
    "answer response assistant model option output candidate reply completion text version "
    "回答 答案 回复 选项 助手 模型 antwort réponse respuesta risposta resposta ответ antwoord svar "
    "odpowiedź"
)
_FIRST = any_of("first former erste[nrs]? premi[èe]re? primer[ao]? prima")
_SECOND = any_of("second latter zweite[nrs]? deuxième seconde? segund[ao] seconda")
_ARTICLE = rf"(?:{any_of('the die der la el a o')}\s+)?"
_OPEN, _CLOSE = r"[\"'(\[{]{0,3}", r"[\"')\]}]{0,3}+"
LABEL = (
    rf"(?:(?i:the\s+)?{NOUN}[\s_\#-]*{_OPEN}(?:[ABC12]|(?<=\()[abc])(?![A-Za-z0-9]){_CLOSE}"
    rf"|{_OPEN}(?<![A-Za-z0-9])[ABC](?![A-Za-z0-9]|'s(?!\s+{NOUN}\b|\s*(?:[.!\n]|$))){_CLOSE}"
    rf"|\b{_ARTICLE}(?:{_FIRST}|{_SECOND})(?:\s+(?:one|{NOUN}))?\b"
    rf"|第[一二]个?(?:{NOUN})?)"
)
NUMBERED = str.maketrans("12", "AB")


def letter_of(label: str) -> str:
    """Return the letter of a label."""
    words = re.search(rf"{_FIRST}|{_SECOND}|第[一二]", label)
    if words:
        return "A" if re.fullmatch(rf"{_FIRST}|第一", words.group()) else "B"
    return label.strip(" \"'()[]{}")[-1].upper().translate(NUMBERED)


def letter_of_key(key: str) -> str | None:
    """Return the letter that a key such as `score_b` names, None if it names none."""
    found = re.search(
        rf"(?:^|[\s_])([ABab])(?:$|[\s_])|(?:{NOUN})[\s_]?([12])(?:$|[\s_])"
        r"|[a-z][\s_]?([12])$|^(first|second)\b",
        key,
    )
    return found and letter_of(found.group(found.lastindex or 0))
