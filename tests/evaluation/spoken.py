"""Answers as a policy would have given them, without a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhf_lightning.evaluation.generate import PolicyAnswers


def answers(
    completions: Sequence[str],
    *,
    prompts: Sequence[str] | None = None,
    domains: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
    kl: Sequence[float] | None = None,
    answers_per_prompt: int = 1,
) -> PolicyAnswers:
    """Return finished answers whose tokens are their words and one for the end."""
    count = len(completions)
    words = sorted({word for text in completions for word in text.split()})
    return PolicyAnswers(
        prompts=list(prompts or (f"prompt {i // answers_per_prompt}" for i in range(count))),
        domains=list(domains or [""] * count),
        completions=list(completions),
        finished=[True] * count,
        token_ids=[[*(2 + words.index(w) for w in text.split()), 1] for text in completions],
        kl=list(kl or [0.0] * count),
        scores=list(scores or [0.0] * count),
        answers_per_prompt=answers_per_prompt,
    )


def part(said: PolicyAnswers, rows: Sequence[int]) -> PolicyAnswers:
    """Return some of the responses."""
    columns = {
        k: [v[row] for row in rows] for k, v in vars(said).items() if isinstance(v, list) and v
    }
    return replace(said, **columns)
