"""The budget of labels: the pairs that people look at, and their cost.

Rules and judges are cheap and people are dear, so people get the pairs that the others are unsure
of, and a random share for validation, which is never trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from scipy.stats import rankdata

from rlhf_lightning.arguments import Above0, AtLeast0, Count, Fraction, Seed, Share
from rlhf_lightning.data.splits import split_fraction
from rlhf_lightning.hparams import Checked, Usual
from rlhf_lightning.preferences.records import SIDES, Label, Pair

Labels = Mapping[str, Sequence[Label]]  # by pair


@dataclass(frozen=True)
class BudgetHparams(Checked):
    """The shares of pairs, votes and wages that make the budget.

    Args:
        automatic_share: share of the pairs labelled by rule, judge or reward model alone.
        validation_share: share of the pairs, chosen by prompt, labelled by people and never trained
            on.
        people_votes: people that look at a pair sent to them for training.
        validation_votes: people that look at a pair held out for validation; with two or more the
            noise of the labels can be measured.
        seconds_per_label: time of one person for one pair, as long as it has not been measured.
        hourly_wage: cost of an hour of a person.
        currency: name of the currency.
        seed: seeds the choice of held-out prompts.
    """

    automatic_share: Annotated[Share, Usual(0.6, 0.7)] = 0.65
    validation_share: Annotated[Fraction, Usual(0.02, 0.2)] = 0.1
    people_votes: Count = 1
    validation_votes: Count = 3
    seconds_per_label: Above0 = 30.0
    hourly_wage: AtLeast0 = 25.0
    currency: str = "USD"
    seed: Seed = 1

    def __post_init__(self) -> None:
        """Check the values, and that the two shares leave room for each other."""
        super().__post_init__()
        if self.automatic_share + self.validation_share > 1:
            shares = f"{self.automatic_share} and validation_share={self.validation_share}"
            raise ValueError(f"automatic_share={shares} must not sum to more than 1")


@dataclass(frozen=True)
class Routing:
    """The split of pairs among annotators; each pair is in exactly one part.

    Args:
        automatic: left to rules and judges.
        people: trained on, and looked at by people.
        validation: looked at by people, and never trained on.
    """

    automatic: tuple[Pair, ...]
    people: tuple[Pair, ...]
    validation: tuple[Pair, ...]


@dataclass(frozen=True)
class Cost:
    """The cost of labels: people's time and wage, and the charges of a judge's endpoint.

    Args:
        labels: number of labels by people.
        hours: hours of people's time.
        wages: wages for these hours.
        charges: charges of the judges.
        currency: name of the currency.
        measured: whether the time was measured, and not assumed.
        money: wages and charges.
    """

    labels: int
    hours: float
    wages: float
    charges: float
    currency: str
    measured: bool
    money: float

    def __str__(self) -> str:
        """Return labels, hours and money in a line."""
        return f"{self.labels} labels, {self.hours:.1f} h, {self.money:.2f} {self.currency}"


def choose_validation(pairs: Sequence[Pair], hparams: BudgetHparams) -> set[str]:
    """Return the ids of the pairs held out: all pairs of prompts that a hash of the seed draws.

    Prompts are taken in the order of their hash until the share is reached, so that the share is
    met within one prompt and adding prompts moves few others.
    """
    by_prompt: dict[str, list[str]] = {}
    for pair in pairs:
        by_prompt.setdefault(pair.prompt_id, []).append(pair.pair_id)
    wanted = round(hparams.validation_share * len(pairs))
    chosen: set[str] = set()
    for prompt_id in sorted(by_prompt, key=lambda p: split_fraction(p, hparams.seed)):
        if len(chosen) >= wanted:
            break
        chosen.update(by_prompt[prompt_id])
    return chosen


def route(
    pairs: Sequence[Pair], automatic: Labels, hparams: BudgetHparams, *, validation: Iterable[str]
) -> Routing:
    """Return who labels what: pairs on which rules and judges are most certain stay with them.

    Args:
        pairs: all pairs to label.
        automatic: labels of rules, judges and reward models, by pair.
        hparams: shares and votes.
        validation: ids of those held out, from `choose_validation`.
    """
    held_out = set(validation)
    rest = [pair for pair in pairs if pair.pair_id not in held_out]
    sure = certainty(automatic)
    ranked = sorted(
        rest, key=lambda p: (-sure.get(p.pair_id, 0.0), split_fraction(p.pair_id, hparams.seed))
    )
    # A pair on which no automatic annotator took a side must not become an automatic label.
    able = sum(sure.get(pair.pair_id, 0.0) > 0 for pair in rest)
    kept = {p.pair_id for p in ranked[: min(round(hparams.automatic_share * len(pairs)), able)]}
    theirs = tuple(pair for pair in rest if pair.pair_id not in kept)
    automatic_alone = tuple(pair for pair in rest if pair.pair_id in kept)
    return Routing(automatic_alone, theirs, tuple(p for p in pairs if p.pair_id in held_out))


def certainty(automatic: Labels) -> dict[str, float]:
    """Return how sure rules and judges are of each pair together, 0 to 1.

    Each annotator that takes a side adds or takes away 1/2, and up to 1/2 more by the rank of its
    margin among its own margins (all of it where it gives none); the size of the mean over
    annotators, those that take no side included, is the certainty. Annotators that disagree cancel.
    """
    ranks = _margin_ranks(label for labels in automatic.values() for label in labels)
    found = {}
    for pair_id, labels in automatic.items():
        total = 0.0
        for label in labels:
            if label.choice in SIDES:
                sign = 1.0 if label.choice == "first" else -1.0
                rank = 1.0 if label.margin is None else ranks[label.annotator][label.margin]
                total += sign * (0.5 + 0.5 * rank)
        found[pair_id] = abs(total) / len(labels) if labels else 0.0
    return found


def planned_cost(num_pairs: int, hparams: BudgetHparams) -> Cost:
    """Return what people's labels of all pairs would cost.

    The validation share gets `validation_votes` people a pair, every other pair `people_votes`.
    """
    held_out = round(hparams.validation_share * num_pairs)
    labels = (num_pairs - held_out) * hparams.people_votes + held_out * hparams.validation_votes
    return _cost(labels, labels * hparams.seconds_per_label, 0.0, hparams, measured=False)


def actual_cost(labels: Iterable[Label], hparams: BudgetHparams, *, charges: float = 0.0) -> Cost:
    """Return the cost of people's labels; unmeasured time counts as assumed.

    Args:
        labels: labels by people.
        hparams: wage, and the time assumed.
        charges: charges of the judges.
    """
    taken = [label.seconds for label in labels]
    seconds = sum(hparams.seconds_per_label if s is None else s for s in taken)
    measured = bool(taken) and None not in taken
    return _cost(len(taken), seconds, charges, hparams, measured=measured)


def _cost(
    labels: int, seconds: float, charges: float, hparams: BudgetHparams, *, measured: bool
) -> Cost:
    hours = seconds / 3600
    wages = hours * hparams.hourly_wage
    return Cost(labels, hours, wages, charges, hparams.currency, measured, wages + charges)


def _margin_ranks(labels: Iterable[Label]) -> dict[str, dict[float, float]]:
    """Return annotator -> margin -> share of its margins that are at most as large."""
    margins: dict[str, list[float]] = {}
    for label in labels:
        if label.choice in SIDES and label.margin is not None:
            margins.setdefault(label.annotator, []).append(label.margin)
    # Equal margins have equal ranks: the last place among them.
    return {
        annotator: dict(zip(values, (rankdata(values, "max") / len(values)).tolist(), strict=True))
        for annotator, values in margins.items()
    }
