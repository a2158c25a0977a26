"""Pairs to label, of the project's own sentences."""

from __future__ import annotations

from rlhf_lightning.preferences.records import Choice, Pair


def make_pairs(number: int, *, gold: int = 0, domain: str = "arithmetic") -> list[Pair]:
    """Return `number` pairs without and then `gold` pairs with a known answer."""
    return [make_pair(n, domain=domain) for n in range(number)] + [
        make_pair(number + n, domain=domain, gold="first") for n in range(gold)
    ]


def make_pair(number: int, *, domain: str = "arithmetic", gold: Choice | None = None) -> Pair:
    return Pair.make(
        f"What is {number} plus {number}?",
        f"It is {2 * number}.",
        f"I would say {2 * number + 1}.",
        domain=domain,
        first_source="sft seed=1",
        second_source="base seed=1",
        gold=gold,
    )
