"""Simulated annotators, with noise and a liking for length."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from rlhf_lightning.arguments import Above0, checked


@checked
@dataclass(frozen=True)
class SimulatedAnnotator:
    """An annotator who prefers by gold, with noise and a bias towards long responses.

    Args:
        name: name of the annotator.
        temperature: tau, in units of gold; smaller is surer.
        length_bias: gold that one more word is worth to this annotator.
    """

    name: str
    temperature: Above0
    length_bias: float

    def prefers_first(self, gold_gap: float, length_gap: int) -> float:
        """Return the probability of preferring the first of two responses.

        `sigmoid((gold_gap + length_bias * length_gap) / temperature)` with the gaps first minus
        second, in gold and in words.
        """
        return 1.0 / (1.0 + exp(-(gold_gap + self.length_bias * length_gap) / self.temperature))


PANEL = (
    SimulatedAnnotator("careful", temperature=0.3, length_bias=0.02),
    SimulatedAnnotator("usual", temperature=0.5, length_bias=0.03),
    SimulatedAnnotator("hasty", temperature=0.75, length_bias=0.04),
)
