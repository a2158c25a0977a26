"""What changed between two answers, word by word."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from rlhf_lightning.reports.markup import text

# A word or a sign, with the space behind it: spaces alone are nothing in common.
_PIECES = re.compile(r"\s+|\w+\s*|[^\w\s]\s*")
_WORD = re.compile(r"\w")
LONGEST = 1500  # pieces; comparing takes their product
_TOO_LITTLE = 0.3  # of the words in common: nothing is left to hold the change against


def marked(before: str, after: str) -> tuple[str, str]:
    """Return both texts as HTML, with `<del>` round what went and `<ins>` round what came.

    Texts that have little in common, or are very long, are returned without marks.
    """
    old, new = _PIECES.findall(before), _PIECES.findall(after)
    plain = text(before), text(after)
    if before == after or max(len(old), len(new)) > LONGEST:
        return plain
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    if _in_common(old, new, matcher) < _TOO_LITTLE:
        return plain
    left, right = [], []
    for tag, i, j, k, m in matcher.get_opcodes():
        gone, come = "".join(old[i:j]), "".join(new[k:m])
        if tag == "equal":
            left.append(text(gone))
            right.append(text(come))
            continue
        left.append(_wrapped("del", gone))
        right.append(_wrapped("ins", come))
    return "".join(left), "".join(right)


def _in_common(old: list[str], new: list[str], matcher: SequenceMatcher[str]) -> float:
    """Return the share of words that both have, in the same order."""
    words = sum(bool(_WORD.match(piece)) for piece in (*old, *new))
    same = sum(
        bool(_WORD.match(piece))
        for block in matcher.get_matching_blocks()
        for piece in old[block.a : block.a + block.size]
    )
    return 2 * same / max(words, 1)


def _wrapped(tag: str, piece: str) -> str:
    kept = piece.rstrip()
    if not kept:
        return text(piece)
    return f"<{tag}>{text(kept)}</{tag}>{text(piece[len(kept) :])}"
