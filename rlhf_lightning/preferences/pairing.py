"""Pairs of candidates: which two responses to a prompt are compared.

Adversarial pairs are made of a finished collection. A policy finds responses that its reward model
overrates; labels identify them: the losing side of a pair that the reward model scores higher. Each
is paired with another response to the same prompt and labelled again. The new label makes the pair
fair: the first one may have been a mistake, and selecting disagreements selects mistakes.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Literal

from rlhf_lightning.arguments import Count
from rlhf_lightning.data.splits import split_fraction
from rlhf_lightning.hparams import Checked
from rlhf_lightning.preferences.records import Answer, Candidate, Journal, Pair, answered, readable

Pairing = Literal["random", "most_different", "best_against_worst"]
# (prompt, response) -> a number, the better the higher.
ScoreFunction = Callable[[str, str], float]
Couple = tuple[Candidate, Candidate]


def make_pairs(
    candidates: Sequence[Candidate],
    *,
    method: Pairing,
    per_prompt: int,
    seed: int,
    score: ScoreFunction | None = None,
) -> list[Pair]:
    """Return the pairs to label: of each prompt the first, then of each the second, and so on.

    So the first of them cover as many prompts as they can. The order within a pair is random, so
    that position carries no information.

    * `random`: any two responses, none twice while others are left.
    * `most_different`: the two that share the fewest words and word pairs, then the next two.
    * `best_against_worst`: by `score` the best and the worst, then the second best and the second
      worst. Responses of equal score make no pair.

    Args:
        candidates: distinct responses to each prompt, as `usable` leaves them.
        method: rule by which two responses are chosen.
        per_prompt: pairs of a prompt, at most.
        seed: seeds all random choices.
        score: scores a response; only `best_against_worst` needs it.

    Raises:
        ValueError: for a method without its score, or a score that is not finite.
    """
    by_prompt: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_prompt.setdefault(candidate.prompt_id, []).append(candidate)
    placed: list[tuple[int, float, Pair]] = []
    for prompt_id, answers in by_prompt.items():
        if method == "random":
            couples = _random(answers, per_prompt, Random(f"{seed}/{prompt_id}"))
        elif method == "most_different":
            couples = _most_different(answers)
        elif score is not None:
            couples = _best_against_worst(answers, score)
        else:
            raise ValueError("pairing.method=best_against_worst needs pairing.score")
        for rank, couple in enumerate(couples[:per_prompt]):
            placed.append((rank, split_fraction(prompt_id, seed), place_couple(couple, seed)))
    placed.sort(key=lambda item: item[:2])
    return [pair for _, _, pair in placed]


def place_couple(couple: Couple, seed: int) -> Pair:
    """Return two candidates as a pair; a hash of the seed says which stands first."""
    a, b = sorted(couple, key=lambda candidate: candidate.response_id)
    if split_fraction(f"{a.response_id}/{b.response_id}", seed) < 0.5:
        a, b = b, a
    others = {"first_source": a.source, "second_source": b.source, "columns": a.columns}
    return Pair.make(a.prompt, a.response, b.response, domain=a.domain, **others)


def _random(answers: Sequence[Candidate], count: int, rng: Random) -> list[Couple]:
    """Return `count` couples, or all; each pass over shuffled responses uses each of them once."""
    most = len(answers) * (len(answers) - 1) // 2
    found: dict[frozenset[int], Couple] = {}
    while len(found) < min(count, most):
        order = rng.sample(range(len(answers)), len(answers))
        for i, j in zip(order[::2], order[1::2], strict=False):
            found.setdefault(frozenset((i, j)), (answers[i], answers[j]))
    return list(found.values())[:count]


def _most_different(answers: Sequence[Candidate]) -> list[Couple]:
    grams = [word_grams(a.response, 1) | word_grams(a.response, 2) for a in answers]
    alike = {(i, j): jaccard(grams[i], grams[j]) for i, j in combinations(range(len(answers)), 2)}
    found: list[tuple[int, int]] = []
    used: Counter[int] = Counter()
    while alike:
        # Of the couples whose responses were used least, the two that are most different.
        best = min(alike, key=lambda c: (used[c[0]] + used[c[1]], alike[c], c))
        del alike[best]
        used.update(best)
        found.append(best)
    return [(answers[i], answers[j]) for i, j in found]


def _best_against_worst(answers: Sequence[Candidate], score: ScoreFunction) -> list[Couple]:
    scored = [(score(readable(a.prompt), a.response), a.response_id, a) for a in answers]
    if bad := [a.response for value, _, a in scored if not math.isfinite(value)]:
        raise ValueError(f"pairing.score: the score of {bad[0][:60]!r} must be finite")
    ranked = sorted(scored, key=lambda item: item[:2], reverse=True)
    couples = zip(ranked[: len(ranked) // 2], ranked[::-1], strict=False)
    return [(best[2], worst[2]) for best, worst in couples if best[0] > worst[0]]


# (prompt, response) pairs -> the score of each, None where there is none.
ResponseScores = Callable[[Sequence[Answer]], list[float | None]]


@dataclass(frozen=True)
class WorstSamples(Checked):
    """The worst responses of a collection, to be paired again.

    Args:
        run: folder of the collection, which has its records.
        score: the reward model that the policy was trained with.
        num_pairs: largest number of pairs.

    Raises:
        ValueError: if `num_pairs` is not positive, or if `run` has no records.
    """

    run: Path
    score: ResponseScores
    num_pairs: Count

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if not (self.run / "data" / "train.jsonl").is_file():
            raise ValueError(f"adversarial.run={self.run} holds no data/train.jsonl: collect first")

    def pairs(self, *, seed: int) -> tuple[list[Pair], int]:
        """Return pairs of overrated responses and better ones, and how many were overrated.

        The most overrated come first. The better one is the response to the same prompt with the
        most labelled victories, less its defeats, that has not met the overrated one yet; it may
        have as many defeats as victories, but not more. An overrated response without such an
        opponent is left out.

        Args:
            seed: seeds the order within a pair, and the choice among equally good responses.
        """
        asked = {p.pair_id: p for p in Journal(self.run / "pairs.jsonl", Pair).read()}
        labelled: list[tuple[Pair, str, str]] = []
        for row in Journal(self.run / "data" / "train.jsonl", dict).read():
            pair, sides = asked[row["pair_id"]], (row["chosen"], row["rejected"])
            # In a conversation a response is its last message.
            winner, loser = (x if isinstance(x, str) else x[-1]["content"] for x in sides)
            labelled.append((pair, winner, loser))
        answers = {(p.prompt_id, t): answered(p, t) for p, *texts in labelled for t in texts}
        scores = dict(zip(answers, self.score(list(answers.values())), strict=True))
        balance = Counter[tuple[str, str]]()
        met: set[frozenset[tuple[str, str]]] = set()
        overrated: dict[tuple[str, str], float] = {}
        for pair, *texts in labelled:
            better, worse = ((pair.prompt_id, text) for text in texts)
            balance.update({better: 1, worse: -1})
            met.add(frozenset((better, worse)))
            low, high = scores[better], scores[worse]
            if low is not None and high is not None and high > low:
                overrated[worse] = max(overrated.get(worse, 0.0), high - low)
        by_prompt: defaultdict[str, dict[tuple[str, str], Candidate]] = defaultdict(dict)
        for candidate in Journal(self.run / "candidates.jsonl", Candidate).read():
            by_prompt[candidate.prompt_id][candidate.prompt_id, candidate.response] = candidate
        pairs = []
        for name in sorted(overrated, key=lambda n: (-overrated[n], n)):
            own = by_prompt[name[0]]
            rivals = [
                (-balance[rival], split_fraction(other.response_id, seed), rival)
                for rival, other in own.items()
                if balance[rival] >= 0
                and rival not in overrated
                and frozenset((rival, name)) not in met
            ]
            if name in own and rivals:
                pairs.append(place_couple((own[name], own[min(rivals)[2]]), seed))
        return pairs[: self.num_pairs], len(overrated)


_WORD = re.compile(r"\w+|[^\w\s]")

Gram = tuple[str, ...]


def word_grams(text: str, n: int) -> frozenset[Gram]:
    """Return the n-grams of words and punctuation, lower case; of a short text all of it as one."""
    words = _WORD.findall(text.lower())
    return frozenset(tuple(words[i : i + n]) for i in range(max(len(words) - n + 1, 1)))


def jaccard(first: frozenset[Gram], second: frozenset[Gram]) -> float:
    """Return the size of the intersection in units of that of the union."""
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)


def near_duplicates(
    train: Sequence[str], held_out: Sequence[str], *, threshold: float = 0.7, n: int = 3
) -> list[tuple[int, int, float]]:
    """Return every training text that is a near duplicate of a held-out one, with the nearest.

    Each by its index, that of the held-out text, and the Jaccard index of their word n-grams. The
    search reads an inverted index of each set's rarest n-grams, which must share one if the index
    reaches the threshold: nothing is missed, and few pairs are compared.

    Args:
        train: training texts.
        held_out: held-out texts.
        threshold: smallest Jaccard index of a near duplicate.
        n: words in an n-gram.

    Raises:
        ValueError: if `threshold` is not above 0 and at most 1, or `n` below 1.

    Source: the prefix filter of Chaudhuri et al. 2006 and Bayardo et al. 2007, "Scaling up all
    pairs similarity search".
    """
    if not 0 < threshold <= 1 or n < 1:
        raise ValueError(f"threshold={threshold}, n={n}: use a threshold in (0, 1] and n >= 1")
    train_sets = [word_grams(text, n) for text in train]
    held_out_sets = [word_grams(text, n) for text in held_out]
    frequency = Counter(gram for grams in (*train_sets, *held_out_sets) for gram in grams)
    index: dict[Gram, list[int]] = defaultdict(list)
    for number, grams in enumerate(held_out_sets):
        for gram in _rarest(grams, threshold, frequency):
            index[gram].append(number)
    found = []
    for number, grams in enumerate(train_sets):
        near = {m for gram in _rarest(grams, threshold, frequency) for m in index.get(gram, ())}
        scored = [(jaccard(grams, held_out_sets[m]), -m) for m in near]
        best, place = max(scored, default=(0.0, 0))
        if best >= threshold:
            found.append((number, -place, best))
    return found


def _rarest(grams: frozenset[Gram], threshold: float, frequency: Counter[Gram]) -> list[Gram]:
    """Return so many of the rarest n-grams that a near duplicate must share one of them."""
    # A near duplicate shares at least threshold * size; the slack is for rounding.
    needed = math.ceil(threshold * len(grams) - 1e-9)
    ordered = sorted(grams, key=lambda gram: (frequency[gram], gram))
    return ordered[: len(grams) - needed + 1]
