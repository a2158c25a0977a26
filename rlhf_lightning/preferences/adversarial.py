"""Adversarial pairs: what a reward model liked and annotators did not, against better answers.

A policy finds the answers that its reward model overrates. When its answers have been labelled,
those are known: the lower side of a pair that the reward model scores higher. Each meets another
answer to the same prompt and is labelled anew. The new label is what makes the pair fair: the first
one may have been a slip, and picking disagreements picks slips.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_lightning.data.records import Text
from rlhf_lightning.data.splits import split_fraction
from rlhf_lightning.preferences.journal import record_journal
from rlhf_lightning.preferences.pairing import place_couple
from rlhf_lightning.preferences.records import Candidate, Pair

# (prompt, response) of many answers -> the score of each, None where there is none.
AnswerScores = Callable[[Sequence[tuple[Text, str]]], list[float | None]]


class Defeat(NamedTuple):
    """A labelled pair by the texts of its sides, and by how much the loser scored higher."""

    prompt_id: str
    winner: str
    loser: str
    overrated: float


@dataclass(frozen=True)
class WorstSamples:
    """The worst answers of a collection, to be paired again.

    Args:
        run: folder of the collection, which has its records.
        score: the reward model that the policy was trained with.
        num_pairs: at most.

    Raises:
        ValueError: if `num_pairs` is not positive, or if `run` has no records.
    """

    run: Path
    score: AnswerScores
    num_pairs: int

    def __post_init__(self) -> None:
        """Check the values."""
        if self.num_pairs < 1:
            raise ValueError(f"adversarial.num_pairs={self.num_pairs} must be at least 1")
        if not (self.run / "data" / "train.jsonl").is_file():
            raise ValueError(
                f"adversarial.run={self.run} holds no data/train.jsonl: give the folder of a "
                "finished run of rlhf_lightning.collect"
            )

    def pairs(self, *, seed: int) -> tuple[list[Pair], int]:
        """Return the pairs, the most overrated first, and how many answers were overrated.

        Args:
            seed: of which side stands first, and of the choice among equally good answers.
        """
        candidates = record_journal(Candidate, self.run / "candidates.jsonl").read()
        defeats = self._defeats()
        return adversarial_pairs(candidates, defeats, num_pairs=self.num_pairs, seed=seed)

    def _defeats(self) -> list[Defeat]:
        asked = {p.pair_id: p for p in record_journal(Pair, self.run / "pairs.jsonl").read()}
        # Not splitlines: it also breaks at characters that JSON leaves inside a string.
        lines = (self.run / "data" / "train.jsonl").read_text(encoding="utf-8").split("\n")
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]
        labelled = [(asked[r["pair_id"]], _said(r["chosen"]), _said(r["rejected"])) for r in rows]
        answers = {(p.prompt_id, t): (p.prompt, t) for p, *texts in labelled for t in texts}
        scores = dict(zip(answers, self.score(list(answers.values())), strict=True))
        found = []
        for pair, winner, loser in labelled:
            high, low = scores[pair.prompt_id, loser], scores[pair.prompt_id, winner]
            known = high is not None and low is not None
            gap = high - low if known else 0.0  # type: ignore[operator]
            found.append(Defeat(pair.prompt_id, winner, loser, gap))
        return found


def adversarial_pairs(
    candidates: Sequence[Candidate], defeats: Sequence[Defeat], *, num_pairs: int, seed: int
) -> tuple[list[Pair], int]:
    """Return pairs of overrated answers and better ones, and how many answers were overrated.

    The better one is the answer to the same prompt with the most labelled victories, less its
    defeats, that has not met the overrated one yet; with as many defeats as victories it will do,
    with more it is none. An overrated answer without such an opponent is left out.

    Args:
        candidates: all answers that can be compared.
        defeats: of labelled pairs, with what the reward model makes of them.
        num_pairs: at most; the most overrated answers come first.
        seed: of which side stands first, and of the choice among equally good answers.
    """
    balance = Counter[tuple[str, str]]()
    met: set[frozenset[tuple[str, str]]] = set()
    for defeat in defeats:
        winner, loser = (defeat.prompt_id, defeat.winner), (defeat.prompt_id, defeat.loser)
        balance[winner] += 1
        balance[loser] -= 1
        met.add(frozenset((winner, loser)))
    by_prompt: dict[str, dict[str, Candidate]] = {}
    for candidate in candidates:
        by_prompt.setdefault(candidate.prompt_id, {})[candidate.response] = candidate
    overrated: dict[tuple[str, str], float] = {}
    for defeat in defeats:
        if defeat.overrated > 0:
            name = (defeat.prompt_id, defeat.loser)
            overrated[name] = max(overrated.get(name, 0.0), defeat.overrated)
    pairs = []
    for name in sorted(overrated, key=lambda n: (-overrated[n], n)):
        answers = by_prompt.get(name[0], {})
        rivals = [
            other
            for text, other in answers.items()
            if (rival := (name[0], text)) != name
            and frozenset((rival, name)) not in met
            and balance[rival] >= 0
            and rival not in overrated
        ]
        if name[1] in answers and rivals:
            best = min(
                rivals,
                key=lambda c: (
                    -balance[c.prompt_id, c.response],
                    split_fraction(c.response_id, seed),
                ),
            )
            pairs.append(place_couple((answers[name[1]], best), seed))
    return pairs[:num_pairs], len(overrated)


def _said(answer: Any) -> str:
    """Return the text of an answer, which in a conversation is its last message."""
    return str(answer if isinstance(answer, str) else answer[-1]["content"])
