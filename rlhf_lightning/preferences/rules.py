"""Rules that score a response without a model: heuristics, and any Python callable."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, SupportsFloat

from rlhf_lightning.arguments import CodeName, Count, Names, checked
from rlhf_lightning.data.demo import grammar
from rlhf_lightning.hparams import Checked

_WORD = re.compile(r"\w+")


class Rule(Protocol):
    """Scores a response as text; the better of two responses has the higher score."""

    def __call__(self, prompt: str, response: str) -> float:
        """Return the score."""


@checked
@dataclass(frozen=True)
class LengthRule(Checked):
    """Prefers responses of about so many words: minus the log of the factor between the two."""

    words: Count
    weight: float = 1.0

    def __call__(self, prompt: str, response: str) -> float:
        """Return 0 at the wanted length, -log 2 at half and at twice of it."""
        count = max(len(_words(response)), 1)
        return -self.weight * abs(math.log(count / self.words))


@checked
@dataclass(frozen=True)
class RepetitionRule:
    """Dislikes repetitive responses: minus the share of word pairs that came before."""

    weight: float = 1.0

    def __call__(self, prompt: str, response: str) -> float:
        """Return 0 for a response whose neighbouring words are always new, down to -weight."""
        words = _words(response)
        pairs = list(pairwise(words))
        return -self.weight * (1 - len(set(pairs)) / len(pairs)) if pairs else 0.0


@checked
@dataclass(frozen=True)
class EndingRule:
    """Prefers responses that end like a sentence.

    Args:
        weight: weight of the rule.
        endings: characters that may end a sentence.
    """

    weight: float = 1.0
    endings: Names = (".", "!", "?", '"', ")", "`")

    def __call__(self, prompt: str, response: str) -> float:
        """Return the weight, or 0."""
        return self.weight if response.rstrip().endswith(tuple(self.endings)) else 0.0


@dataclass(frozen=True)
class PhraseRule:
    """Counts phrases, whole words and any case.

    Args:
        phrases: phrases to count.
        weight: weight of each find; negative for phrases that make a response worse.
    """

    phrases: Sequence[str]
    weight: float

    def __post_init__(self) -> None:
        """Check that there is something to look for."""
        if not self.phrases or not all(isinstance(p, str) and p.strip() for p in self.phrases):
            raise ValueError("phrases must name at least one phrase, none of them empty")

    def __call__(self, prompt: str, response: str) -> float:
        """Return the weight times the number of finds."""
        text = " ".join(response.lower().split())
        patterns = (rf"(?<!\w){re.escape(phrase.lower())}(?!\w)" for phrase in self.phrases)
        return self.weight * sum(len(re.findall(pattern, text)) for pattern in patterns)


@checked
@dataclass(frozen=True)
class CallableRule:
    """Any function `(prompt, response) -> number`.

    Args:
        function: the function itself, `path.py:name`, or a dotted name.
        weight: weight of the rule.

    Raises:
        ValueError: if nothing callable is called that.
    """

    function: Callable[[str, str], Any] | CodeName
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Look the function up, so that a wrong name fails before anything is sampled."""
        self._found  # noqa: B018

    @cached_property
    def _found(self) -> Callable[[str, str], Any]:
        if not isinstance(self.function, str):
            return self.function
        from rlhf_lightning.rollout.scorers.base import load_function  # torch: who asks pays

        return load_function(self.function)

    def __call__(self, prompt: str, response: str) -> float:
        """Return the weight times what the function says.

        Raises:
            ValueError: if that is no finite number.
        """
        value = self._found(prompt, response)
        if not isinstance(value, SupportsFloat) or not math.isfinite(value):
            name = getattr(self._found, "__name__", "function")
            raise ValueError(f"the rule {name} returned {value!r}: return a finite number")
        return self.weight * float(value)


def demo_style() -> list[PhraseRule]:
    """Return rules about the built-in world's manners: they know style, and no fact."""
    return [
        PhraseRule((*grammar.POLITE_OPENERS, *grammar.POLITE_CLOSERS), 0.5),
        PhraseRule((*grammar.RUDE_OPENERS, *grammar.RUDE_CLOSERS), -1.0),
        PhraseRule(grammar.FILLERS, -0.5),
        PhraseRule(grammar.CORE_FORMS["unknown"], -1.0),
    ]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
