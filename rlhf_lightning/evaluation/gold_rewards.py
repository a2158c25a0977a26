"""Judges that compare a response with a known right one: the same text, number or command.

Each names the prompt columns it reads in `columns`; `gold_scores` hands them over by name.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

from rlhf_lightning.arguments import checked
from rlhf_lightning.data.sources.templates import REFERENCE, normalized
from rlhf_lightning.rollout.scorers.verifiable import (
    NumberReward,
    command_reward,
    with_opened_thoughts,
)

Texts: TypeAlias = Sequence[str]  # one a row
Flags: TypeAlias = Sequence[bool]


class ExactMatchGold:
    """1.0 where the response equals the reference up to white space and ended by itself; else 0.0.

    Args:
        column: column of the references.
    """

    @checked
    def __init__(self, *, column: str = REFERENCE) -> None:
        self.columns = (column,)

    def __call__(
        self, prompts: Texts, completions: Texts, finished: Flags, **columns: Texts
    ) -> list[float]:
        """Return 1.0 or 0.0 a row."""
        rows = zip(completions, finished, columns[self.columns[0]], strict=True)
        return [
            float(done and normalized(mine) == normalized(wanted)) for mine, done, wanted in rows
        ]

    def details(
        self, prompts: Texts, completions: Texts, finished: Flags, **columns: Texts
    ) -> Mapping[str, list[float]]:
        """Return `exact_match`, and `first_word_match`: of a command, the right program."""
        rows = zip(completions, columns[self.columns[0]], strict=True)
        return {
            "exact_match": self(prompts, completions, finished, **columns),
            "first_word_match": [
                float(mine.split()[:1] == wanted.split()[:1]) for mine, wanted in rows
            ],
        }


class NumberGold:
    """1.0 where the response gives the right number, else 0.0, whatever the reward pays for it."""

    @checked
    def __init__(self, reward: NumberReward) -> None:
        self.reward = reward
        self.columns = (reward.column,)

    def __call__(
        self, prompts: Texts, completions: Texts, finished: Flags, **columns: Texts
    ) -> list[float]:
        """Return 1.0 or 0.0 per row; a response that was cut off after its number counts."""
        wanted = self.reward.references(columns)
        rows = zip(with_opened_thoughts(prompts, completions), wanted, strict=True)
        return [float(self.reward.extract(text) == number) for text, number in rows]

    def details(
        self, prompts: Texts, completions: Texts, finished: Flags, **columns: Texts
    ) -> Mapping[str, list[float]]:
        """Return `solved`, the score itself, and `answered`: some number was given."""
        return {
            "solved": self(prompts, completions, finished, **columns),
            "answered": [float(one is not None) for one in self.votes(prompts, completions)],
        }

    def votes(self, prompts: Texts, completions: Texts) -> list[Hashable]:
        """Return the number that each response gives, None without one; for maj@k."""
        return [self.reward.extract(text) for text in with_opened_thoughts(prompts, completions)]


class CommandGold:
    """The share of a shell command that is right, from 0 to 1: `command_reward`.

    Args:
        column: column of the right commands.
    """

    @checked
    def __init__(self, *, column: str = REFERENCE) -> None:
        self.columns = (column,)

    def __call__(
        self, prompts: Texts, completions: Texts, finished: Flags, **columns: Texts
    ) -> list[float]:
        """Return the share a row."""
        return command_reward(prompts, completions, completion=columns[self.columns[0]])
