"""From candidates to pairs: which two answers to a prompt are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations
from random import Random
from typing import Literal, get_args

from rlhf_lightning.data.splits import split_fraction
from rlhf_lightning.preferences.near_duplicates import jaccard, word_grams
from rlhf_lightning.preferences.records import Candidate, Pair, readable

Pairing = Literal["random", "most_different", "best_against_worst"]
PAIRINGS: tuple[str, ...] = get_args(Pairing)
# (prompt, response) -> a number, the better the higher.
ScoreFunction = Callable[[str, str], float]
Couple = tuple[Candidate, Candidate]


def make_pairs(
    candidates: Sequence[Candidate],
    *,
    method: Pairing,
    per_prompt: int,
    num_pairs: int | None,
    seed: int,
    score: ScoreFunction | None = None,
) -> list[Pair]:
    """Return the pairs to label: of each prompt the first, then of each the second, and so on.

    So a smaller `num_pairs` covers as many prompts as it can. What stands first in a pair is drawn
    at random, so that the place says nothing.

    * `random`: any two answers, none twice while others are left.
    * `most_different`: the two that share the fewest words and word pairs, then the next two.
    * `best_against_worst`: by `score` the best and the worst, then the second best and the second
      worst. Answers of one score make no pair.

    Args:
        candidates: different answers to a prompt, as `usable` leaves them.
        method: how two answers are chosen.
        per_prompt: pairs of a prompt, at most.
        num_pairs: of all prompts; None for all.
        seed: of what is drawn.
        score: of an answer; `best_against_worst` needs it, the others do not use it.

    Raises:
        ValueError: for an unknown method, a count below 1, or a method without its score.
    """
    if method not in PAIRINGS:
        raise ValueError(f"pairing.method={method!r} is unknown: use {', '.join(PAIRINGS)}")
    if per_prompt < 1 or (num_pairs is not None and num_pairs < 1):
        raise ValueError(
            f"pairing.per_prompt={per_prompt}, num_pairs={num_pairs} must be at least 1"
        )
    if method == "best_against_worst" and score is None:
        raise ValueError("pairing.method=best_against_worst needs pairing.score: what is better?")
    by_prompt: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_prompt.setdefault(candidate.prompt_id, []).append(candidate)
    placed: list[tuple[int, float, Pair]] = []
    for prompt_id, answers in by_prompt.items():
        if method == "random":
            couples = _random(answers, per_prompt, Random(f"{seed}/{prompt_id}"))
        elif method == "most_different":
            couples = _most_different(answers)
        else:
            assert score is not None  # or it was refused above
            couples = _best_against_worst(answers, score)
        for rank, couple in enumerate(couples[:per_prompt]):
            placed.append((rank, split_fraction(prompt_id, seed), place_couple(couple, seed)))
    placed.sort(key=lambda item: item[:2])
    return [pair for _, _, pair in placed[:num_pairs]]


def sources(pairs: Sequence[Pair]) -> dict[str, int]:
    """Return how often each source stands in the pairs."""
    return dict(Counter(s for pair in pairs for s in (pair.first_source, pair.second_source)))


def place_couple(couple: Couple, seed: int) -> Pair:
    """Return two candidates as a pair; a hash of the seed says which stands first."""
    a, b = sorted(couple, key=lambda candidate: candidate.response_id)
    if split_fraction(f"{a.response_id}/{b.response_id}", seed) < 0.5:
        a, b = b, a
    return Pair.make(
        a.prompt,
        a.response,
        b.response,
        domain=a.domain,
        first_source=a.source,
        second_source=b.source,
    )


def _random(answers: Sequence[Candidate], count: int, rng: Random) -> list[Couple]:
    """Return `count` couples, or all; each pass over shuffled answers uses every answer once."""
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
    rest = sorted(alike, key=lambda couple: (alike[couple], couple))
    while rest:
        # Of the couples whose answers were used least, the two that are most different.
        best = min(rest, key=lambda c: (used[c[0]] + used[c[1]], alike[c], c))
        rest.remove(best)
        used.update(best)
        found.append(best)
    return [(answers[i], answers[j]) for i, j in found]


def _best_against_worst(answers: Sequence[Candidate], score: ScoreFunction) -> list[Couple]:
    scored = [(score(readable(a.prompt), a.response), a.response_id, a) for a in answers]
    ranked = sorted(scored, key=lambda item: item[:2], reverse=True)
    half = len(ranked) // 2
    return [
        (best[2], worst[2])
        for best, worst in zip(ranked[:half], ranked[::-1], strict=False)
        if best[0] > worst[0]
    ]
