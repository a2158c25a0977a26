"""What a judge said: one judgement an order, how replies are read, and what they come to."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rlhf_lightning.preferences.agreement import Share
from rlhf_lightning.preferences.journal import Journal
from rlhf_lightning.preferences.records import SIDES, Side

LETTERS = ("A", "B", "C")
_BOXED = re.compile(r"\[\[\s*([ABC])\s*\]\]")
# "A, B, or C" repeats what may be said, and says nothing.
_LIST = r"(?!\s*,\s*(?:or\s+|and\s+)?[ABC]\s*(?:,|or\b|and\b|[.)\]]*\s*(?:$|\n)))"
_END = _LIST + r"(?:\s*$|\s*\n|\s*[.:,;)\]*])"
_NAMED = re.compile(
    r"\b(?i:verdict|answer|choice|winner)\s*(?:is|:)\s*[*\[(\"']{0,4}([ABC])" + _END
)
_BETTER = r"\s+is\s+(?:clearly\s+|much\s+)?(?:the\s+)?(?:better|best)\b"
_ALONE = re.compile(rf"^\W*(?:Answer\s+)?([AB](?={_BETTER})|[ABC]{_END})")


@dataclass(frozen=True)
class Judgement:
    """What a judge said of a pair in one order.

    Args:
        pair_id: of the pair.
        judge: its name.
        order: which answer of the pair was shown as A.
        verdict: the better answer of the pair, `tie`, or None where the reply cannot be read.
        reply: what it wrote, shortened; None if the request was refused.
        input_tokens, output_tokens: as the service counts them.
        cost: of the request.
        retries: before it answered.
        probabilities: of A, B and C, where they were read instead of the text.
    """

    pair_id: str
    judge: str
    order: Side
    verdict: Literal["first", "second", "tie"] | None
    reply: str | None
    input_tokens: int
    output_tokens: int
    cost: float
    retries: int
    probabilities: Mapping[str, float] | None = None


def judgement_journal(path: Path | str) -> Journal[Judgement]:
    """Return the journal of judgements."""
    return Journal(path, write=asdict, read=lambda row, where: Judgement(**row))


def parse_verdict(reply: str) -> str | None:
    """Return A, B or C (neither) as a reply names it, None if it cannot be told.

    Read are, in this order: the last `[[A]]`; a letter at the start that is followed by nothing, a
    line break, punctuation or "is better"; the last "answer: A", "verdict is B"; the word tie
    alone. A list of letters, "A, B, or C", names none.
    """
    if boxed := _BOXED.findall(reply):
        return str(boxed[-1])
    if alone := _ALONE.match(reply):
        return alone.group(1)[0]
    if named := _NAMED.findall(reply):
        return str(named[-1])
    return "C" if re.fullmatch(r"\W*(tie|neither|draw)\W*", reply, re.I) else None


def letter_probabilities(top_tokens: Mapping[str, float]) -> dict[str, float] | None:
    """Return the probabilities of A, B and C among themselves; None if none is among the tokens."""
    found = dict.fromkeys(LETTERS, 0.0)
    for token, logprob in top_tokens.items():
        if token.strip() in found:
            found[token.strip()] += math.exp(logprob)
    total = sum(found.values())
    return {letter: value / total for letter, value in found.items()} if total > 0 else None


def mean_gap(both: Iterable[Judgement]) -> float:
    """Return the pair's first answer's probability minus the second's, mean over both orders."""
    gaps = []
    for judgement in both:
        shown = judgement.probabilities or dict.fromkeys(LETTERS, 1 / 3)
        gap = shown["A"] - shown["B"]
        gaps.append(gap if judgement.order == "first" else -gap)
    return sum(gaps) / len(gaps)


@dataclass(frozen=True)
class JudgeFigures:
    """What a judge was like.

    Args:
        requests: replies and refusals.
        retries: requests that were sent again.
        refused: requests that the service would not take.
        unreadable: replies without a verdict.
        ties: replies that find neither better.
        shown_first_wins: of the replies that take a side, how often it is the one shown first.
        consistent: of the pairs with a readable reply in both orders, how often they agree.
        input_tokens, output_tokens: as the service counts them.
        cost: of all requests.
    """

    requests: int
    retries: int
    refused: int
    unreadable: int
    ties: int
    shown_first_wins: Share
    consistent: Share
    input_tokens: int
    output_tokens: int
    cost: float


def judge_figures(judgements: Sequence[Judgement]) -> JudgeFigures:
    """Return the figures of one judge."""
    decided = [j for j in judgements if j.verdict in SIDES]
    by_pair: dict[str, list[Judgement]] = {}
    for judgement in judgements:
        if judgement.verdict is not None:
            by_pair.setdefault(judgement.pair_id, []).append(judgement)
    both = [found for found in by_pair.values() if len(found) == 2]
    return JudgeFigures(
        requests=len(judgements),
        retries=sum(j.retries for j in judgements),
        refused=sum(j.reply is None for j in judgements),
        unreadable=sum(j.verdict is None and j.reply is not None for j in judgements),
        ties=sum(j.verdict == "tie" for j in judgements),
        shown_first_wins=Share.of(sum(j.verdict == j.order for j in decided), len(decided)),
        consistent=Share.of(sum(a.verdict == b.verdict for a, b in both), len(both)),
        input_tokens=sum(j.input_tokens for j in judgements),
        output_tokens=sum(j.output_tokens for j in judgements),
        cost=sum(j.cost for j in judgements),
    )
