"""The pictures of a run: the one beside its number, and those below."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_lightning.reports.charts import Figure
from rlhf_lightning.reports.curves import Rows, curves
from rlhf_lightning.reports.distributions import Lines, answers_figures, wins_figures
from rlhf_lightning.reports.outcome import Metrics, best_of_figures


@dataclass(frozen=True)
class Pictures:
    """The figures of a run, each in one place.

    Args:
        headline: the one beside the number, None where there is none.
        answers: of wins, and of responses before and after; `answers_of` says of how many.
        best_of: of the best of n.
        curves, more_curves: over iterations; those that one looks at first, and the others.
    """

    headline: Figure | None
    answers: list[Figure]
    answers_of: str
    best_of: list[Figure]
    curves: list[Figure]
    more_curves: list[Figure]


def pictures(rows: Rows, metrics: Metrics, lines: Lines) -> Pictures:
    """Return the figures of a run from its rows, final metrics and distributions."""
    first, more = curves(rows)
    answers, of = answers_figures(lines)
    answers = [*wins_figures(metrics), *answers]
    best_of = best_of_figures(metrics)
    places = next((figures for figures in (best_of, first, answers) if figures), None)
    headline = places.pop(0) if places else None
    return Pictures(headline, answers, of, best_of, first, more)
