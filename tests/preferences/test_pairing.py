"""Pairing: which answers meet, how often, and in which order."""

from __future__ import annotations

from collections import Counter

import pytest

from rlhf_lightning.preferences.pairing import make_pairs
from rlhf_lightning.preferences.records import Candidate

ANSWERS = ["a b c d", "a b c e", "x y z", "x y w", "a b"]


def candidates(num_prompts: int, answers=ANSWERS) -> list[Candidate]:
    return [
        Candidate.make(
            f"q{i}", f"{text} {i}", model=f"m{j}", settings={}, seed=0, domain=f"d{i % 2}"
        )
        for i in range(num_prompts)
        for j, text in enumerate(answers)
    ]


def texts(pair) -> frozenset[str]:
    return frozenset((pair.first, pair.second))


def words(prompt: str, response: str) -> float:
    return len(response.split())


def test_a_smaller_number_of_pairs_covers_as_many_prompts_as_it_can() -> None:
    more = make_pairs(candidates(30), method="random", per_prompt=3, seed=1)
    assert {p.prompt for p in more[:30]} == {f"q{i}" for i in range(30)}
    assert len(more) == 90
    assert set(Counter(p.prompt for p in more).values()) == {3}
    assert all(p.domain == f"d{int(str(p.prompt)[1:]) % 2}" for p in more)


def test_no_pair_comes_twice_and_all_can_be_had() -> None:
    pairs = make_pairs(candidates(3), method="random", per_prompt=99, seed=1)
    assert len(pairs) == 30
    assert len({(p.prompt, texts(p)) for p in pairs}) == 30
    one = make_pairs(candidates(3, ["only"]), method="random", per_prompt=2, seed=1)
    assert one == []


def test_what_stands_first_is_drawn() -> None:
    pairs = make_pairs(candidates(400, ["one", "two"]), method="random", per_prompt=1, seed=1)
    first = sum(p.first.startswith("one") for p in pairs)
    assert 160 < first < 240
    found = Counter(s for p in pairs for s in (p.first_source, p.second_source))
    assert found == {"m0 seed=0": 400, "m1 seed=0": 400}


def test_the_most_different_answers_meet_first() -> None:
    # Every answer ends with the number of its prompt, so those of two words share least.
    pairs = make_pairs(candidates(1), method="most_different", per_prompt=10, seed=1)
    assert len(pairs) == 10
    assert texts(pairs[0]) in (
        {frozenset(("a b c d 0", "x y z 0")), frozenset(("a b c d 0", "x y w 0"))}
        | {frozenset(("a b c e 0", "x y z 0")), frozenset(("a b c e 0", "x y w 0"))}
    )
    alike = frozenset(("a b c d 0", "a b c e 0"))
    assert alike not in [texts(p) for p in pairs[:3]]
    # Every answer is used before one is used a second time.
    used = Counter(text for pair in pairs[:2] for text in texts(pair))
    assert max(used.values()) == 1


def test_the_best_meets_the_worst() -> None:
    answers = ["w", "w w", "w w w", "w w w w", "v v v v"]
    pairs = make_pairs(
        candidates(1, answers),
        method="best_against_worst",
        per_prompt=5,
        seed=1,
        score=words,
    )
    assert len(pairs) == 2
    assert min(texts(pairs[0]), key=len) == "w 0"
    assert min(texts(pairs[1]), key=len) == "w w 0"


def test_a_score_that_is_none_ranks_no_response() -> None:
    answers = candidates(1, ["w", "w w", "w w w"])
    scores = iter([1.0, float("nan"), 2.0])
    with pytest.raises(ValueError, match=r"score of 'w w 0' must be finite"):
        make_pairs(
            answers,
            method="best_against_worst",
            per_prompt=1,
            seed=1,
            score=lambda *_: next(scores),
        )
