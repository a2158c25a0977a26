"""Aggregation of labels into preferences: deciding votes, margins, and pairs that are left out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_lightning.preferences.agreement import THREE, collect_votes, dawid_skene
from rlhf_lightning.preferences.records import SIDES, Label, Pair, completion_of, variables_of

Method = Literal["people_first", "majority", "dawid_skene"]
NO_VOTE = "no vote"
NO_MAJORITY = "no majority among the votes"
TIE = "tie: neither response is better"


@dataclass(frozen=True)
class Verdict:
    """The preference that follows from the labels of one pair.

    Args:
        pair: pair that the labels are about.
        choice: the better response; None if the pair is no preference.
        margin: certainty, 0 to 1.
        votes: all votes by choice; `both_bad` counts as `tie`.
        by_people: whether people's votes decided.
        left_out: reason why there is no choice, else None.
    """

    pair: Pair
    choice: Literal["first", "second"] | None
    margin: float
    votes: Mapping[str, int]
    by_people: bool
    left_out: str | None = None


def by_pair(labels: Iterable[Label]) -> dict[str, list[Label]]:
    """Return the labels by pair, without those that skip; of two by one annotator the last."""
    kept: dict[str, dict[str, Label]] = defaultdict(dict)
    for label in labels:
        if label.choice != "skip":
            kept[label.pair_id][label.annotator] = label
    return {pair_id: list(found.values()) for pair_id, found in kept.items()}


def aggregate(
    pairs: Sequence[Pair],
    labels: Iterable[Label],
    *,
    people: Collection[str],
    method: Method = "people_first",
) -> list[Verdict]:
    """Return one verdict per pair, in their order.

    * `people_first`: the majority of the people asked; where none was, that of all annotators.
      The margin is the votes for minus those against, of all annotators, in units of all votes,
      at least 0.
    * `majority`: the same, every annotator counting alike.
    * `dawid_skene`: the likelier response given every annotator's confusion matrix, which is
      estimated from the same labels; the margin is the difference of the two probabilities.

    Args:
        pairs: pairs that get a verdict.
        labels: labels of any pairs and annotators.
        people: names of the annotators who are people.
        method: rule by which votes are weighed.
    """
    wanted = {pair.pair_id for pair in pairs}
    found = by_pair(label for label in labels if label.pair_id in wanted)
    if method == "dawid_skene":
        return _by_model(pairs, found, people)
    return [
        _by_count(pair, found.get(pair.pair_id, []), people if method == "people_first" else ())
        for pair in pairs
    ]


def preference_row(verdict: Verdict, *, margin_scale: float = 1.0) -> dict[str, Any]:
    """Return a verdict as a record in TRL's preference format, with its origin.

    Args:
        verdict: a verdict with a choice.
        margin_scale: margin of a pair on which all agree, in units of the reward.

    Raises:
        ValueError: if the pair is no preference.
    """
    pair, choice = verdict.pair, verdict.choice
    if choice is None:
        raise ValueError(f"pair {pair.pair_id} is no preference: {verdict.left_out}")
    answers, sources = (pair.first, pair.second), (pair.first_source, pair.second_source)
    if choice == "second":
        answers, sources = answers[::-1], sources[::-1]
    return {
        "prompt": pair.prompt if isinstance(pair.prompt, str) else list(pair.prompt),
        "chosen": completion_of(pair.prompt, answers[0]),
        "rejected": completion_of(pair.prompt, answers[1]),
        **variables_of(pair),
        "domain": pair.domain,
        "margin": round(verdict.margin * margin_scale, 6),
        "pair_id": pair.pair_id,
        "votes": dict(verdict.votes),
        "labelled_by": "people" if verdict.by_people else "automatic",
        "chosen_source": sources[0],
        "rejected_source": sources[1],
    }


def left_out(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Return how many pairs are no preference, by reason."""
    return dict(Counter(v.left_out for v in verdicts if v.left_out is not None))


def _by_count(pair: Pair, labels: Sequence[Label], people: Collection[str]) -> Verdict:
    votes = _count(labels)
    theirs = [label for label in labels if label.annotator in people]
    deciding = _count(theirs or labels)
    choice, why = _majority(deciding)
    against = SIDES[1] if choice == SIDES[0] else SIDES[0]
    margin = max(votes[choice] - votes[against], 0) / votes.total() if choice else 0.0
    return Verdict(pair, choice, margin, votes, bool(theirs), why)


def _majority(
    votes: Counter[str],
) -> tuple[Literal["first", "second"] | None, str | None]:
    if not votes.total():
        return None, NO_VOTE
    top = [choice for choice, n in votes.items() if n == max(votes.values())]
    if len(top) > 1:
        return None, NO_MAJORITY
    if top[0] == "tie":
        return None, TIE
    return ("first" if top[0] == "first" else "second"), None


def _by_model(
    pairs: Sequence[Pair], found: Mapping[str, list[Label]], people: Collection[str]
) -> list[Verdict]:
    votes = collect_votes(label for labels in found.values() for label in labels)
    if not votes.items:
        return [_by_count(pair, [], people) for pair in pairs]
    model = dawid_skene(votes)
    posterior = dict(zip(votes.items, model.posterior, strict=True))
    verdicts = []
    for pair in pairs:
        labels = found.get(pair.pair_id, [])
        if not labels:
            verdicts.append(_by_count(pair, labels, people))
            continue
        likely = dict(zip(THREE, posterior[pair.pair_id].tolist(), strict=True))
        best = max(likely, key=lambda choice: likely[choice])
        choice, why = _majority(Counter({best: 1}))
        by_people = any(label.annotator in people for label in labels)
        margin = abs(likely["first"] - likely["second"]) if choice else 0.0
        verdicts.append(Verdict(pair, choice, margin, _count(labels), by_people, why))
    return verdicts


def _count(labels: Iterable[Label]) -> Counter[str]:
    return Counter("tie" if x.choice == "both_bad" else x.choice for x in labels)
