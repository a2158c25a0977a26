"""Annotators of pairs: the protocol, rules, and simulated people."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Annotated, Protocol

from pydantic import Field

from rlhf_lightning.arguments import AtLeast0, Seed, checked
from rlhf_lightning.data.demo.annotators import SimulatedAnnotator
from rlhf_lightning.data.progress import with_bar
from rlhf_lightning.data.records import asked_columns
from rlhf_lightning.preferences.journal import Journal
from rlhf_lightning.preferences.records import AnnotatorKind, Choice, Label, Pair, Side, readable
from rlhf_lightning.preferences.rules import Rule

# (prompts, completions, finished) -> scores, as evaluation's gold rewards are; by name also the
# prompt columns that its `columns` names.
Gold = Callable[..., list[float]]


class AnnotationError(RuntimeError):
    """An annotator failed; its earlier labels are kept."""


class Annotator(Protocol):
    """Compares responses.

    The label of a pair must not depend on other pairs in the same or an earlier call: a killed run
    resumes with the rest.

    Attributes:
        name: name of the annotator, written to every label.
        kind: kind of annotator.
        batch_size: pairs of one call, whose labels reach the disk together.
    """

    name: str
    kind: AnnotatorKind
    batch_size: int

    def label(self, pairs: Sequence[Pair]) -> list[Label]:
        """Return one label a pair, in their order."""


class RuleAnnotator:
    """Prefers the response with the higher sum of scores by rules.

    Args:
        rules: scorers of a response; weights are theirs. A rule may also be a list of rules.
        name: name of the annotator.
        tie_below: a difference of scores that is smaller than this, or 0, is a tie.

    Raises:
        ValueError: if there is no rule, or `tie_below` is negative.
    """

    kind: AnnotatorKind = "rule"
    batch_size = 1000

    @checked
    def __init__(
        self,
        rules: Annotated[Sequence[Rule | Sequence[Rule]], Field(min_length=1)],
        *,
        name: str = "rules",
        tie_below: AtLeast0 = 0.0,
    ) -> None:
        flat: list[Rule] = []
        for rule in rules:
            flat += [rule] if callable(rule) else rule
        if not flat:
            raise ValueError("rules must hold at least one rule")
        self.rules = flat
        self.name = name
        self.tie_below = tie_below

    def score(self, prompt: str, response: str) -> float:
        """Return the sum of the rules' scores."""
        return sum(rule(prompt, response) for rule in self.rules)

    def label(self, pairs: Sequence[Pair]) -> list[Label]:
        """Return one label a pair; the margin is the difference of the scores."""
        labels = []
        for pair in pairs:
            prompt = readable(pair.prompt)
            gap = self.score(prompt, pair.first) - self.score(prompt, pair.second)
            labels.append(by_gap(pair, gap, self, tie_below=self.tie_below))
        return labels


@checked(but=("gold",))
@dataclass(eq=False)
class SimulatedPerson:
    """A simulated person who sees one order of a pair and prefers by gold, with noise and biases.

    The label of a pair is a function of seed, name and pair only.

    Args:
        person: name, noise and liking for length, see `SimulatedAnnotator`.
        gold: the gold reward that the person prefers by.
        seed: seeds the noise and the order in which pairs are shown.
        position_bias: gold that being shown first is worth.
        tie_below: a difference felt (gold and length) that is smaller than this is a tie.
        bad_below: both responses are bad if the gold of both is below this; None for never.
        name: another name than the person's.
    """

    person: SimulatedAnnotator
    gold: Gold
    _: KW_ONLY
    seed: Seed
    position_bias: float = 0.0
    tie_below: AtLeast0 = 0.0
    bad_below: float | None = None
    name: str = ""
    kind: AnnotatorKind = field(default="simulated", init=False)
    batch_size: int = field(default=1000, init=False)

    def __post_init__(self) -> None:
        """Check that there is a gold reward."""
        if not callable(self.gold):
            raise ValueError(
                f"the simulated person {self.person.name} prefers by a gold reward, and the "
                "dataset has none: set dataset.gold, or choose annotator=page"
            )
        self.name = self.name or self.person.name

    def label(self, pairs: Sequence[Pair]) -> list[Label]:
        """Return one label a pair."""
        scores = gold_scores(pairs, self.gold)
        return [self._label(pair, *both) for pair, both in zip(pairs, scores, strict=True)]

    def _label(self, pair: Pair, first: float, second: float) -> Label:
        rng = Random(f"{self.seed}/{self.name}/{pair.pair_id}")
        order: Side = "first" if rng.random() < 0.5 else "second"
        words = len(pair.first.split()) - len(pair.second.split())
        shown = self.position_bias if order == "first" else -self.position_bias
        prefers_first = rng.random() < self.person.prefers_first(first - second + shown, words)
        choice: Choice = "first" if prefers_first else "second"
        if self.bad_below is not None and max(first, second) < self.bad_below:
            choice = "both_bad"
        elif abs(first - second + self.person.length_bias * words) < self.tie_below:
            choice = "tie"
        return Label(pair.pair_id, self.name, choice, self.kind, order, now())


def gold_scores(pairs: Sequence[Pair], gold: Gold) -> list[tuple[float, float]]:
    """Return the gold reward of the first and of the second response of every pair.

    Raises:
        ValueError: if the gold reward needs a column that no prompt has.
    """
    prompts = [readable(pair.prompt) for pair in pairs]
    finished = [True] * len(pairs)
    columns = asked_columns(gold, [pair.columns for pair in pairs])
    first = gold(prompts, [pair.first for pair in pairs], finished, **columns)
    second = gold(prompts, [pair.second for pair in pairs], finished, **columns)
    return list(zip(first, second, strict=True))


def by_gap(pair: Pair, gap: float, annotator: Annotator, *, tie_below: float = 0.0) -> Label:
    """Return the label of an annotator that scores both responses: first minus second is `gap`.

    Raises:
        AnnotationError: if the gap is not finite.
    """
    if not math.isfinite(gap):
        raise AnnotationError(
            f"{annotator.name} scored the responses of pair {pair.pair_id} {gap} apart: its scores "
            "must be finite"
        )
    choice: Choice = "tie" if gap == 0 or abs(gap) < tie_below else "first" if gap > 0 else "second"
    return Label(
        pair.pair_id, annotator.name, choice, annotator.kind, "first", now(), margin=abs(gap)
    )


def label_pairs(
    annotator: Annotator, pairs: Iterable[Pair], journal: Journal[Label]
) -> list[Label]:
    """Return the annotator's label of every pair, in their order; ask only for missing ones.

    Labels reach the journal batch by batch, so a killed run continues where it was.

    Raises:
        AnnotationError: if the annotator fails; its earlier labels are in the journal.
    """
    wanted = list(pairs)
    known = {x.pair_id: x for x in journal.read() if x.annotator == annotator.name}
    missing = [pair for pair in wanted if pair.pair_id not in known]
    starts = range(0, len(missing), annotator.batch_size)
    for start in with_bar(starts, f"labels by {annotator.name}", "batches"):
        batch = missing[start : start + annotator.batch_size]
        labels = annotator.label(batch)
        if [x.pair_id for x in labels] != [pair.pair_id for pair in batch]:
            raise AnnotationError(
                f"{annotator.name} returned {len(labels)} labels for {len(batch)} pairs, or in "
                "another order: return one a pair"
            )
        journal.append(labels)
        known |= {x.pair_id: x for x in labels}
    return [known[pair.pair_id] for pair in wanted]


def now() -> str:
    """Return the time as labels write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
