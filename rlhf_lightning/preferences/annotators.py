"""Annotators of pairs: the protocol, rules, simulated people, and people at the page."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Annotated, Any, Protocol, SupportsFloat

from pydantic import Field

from rlhf_lightning.arguments import AtLeast0, CodeName, Count, Names, Seed, checked
from rlhf_lightning.data.demo import grammar
from rlhf_lightning.data.demo.annotators import SimulatedAnnotator
from rlhf_lightning.data.progress import with_bar
from rlhf_lightning.data.records import asked_columns
from rlhf_lightning.data.splits import split_fraction
from rlhf_lightning.preferences.records import Choice, Journal, Kind, Label, Pair, Side, readable
from rlhf_lightning.rollout.scorers.functions import load_function

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
    kind: Kind
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

    kind: Kind = "rule"
    batch_size = 1000

    @checked
    def __init__(
        self,
        rules: Annotated[Sequence[Rule | Sequence[Rule]], Field(min_length=1)],
        *,
        name: str = "rules",
        tie_below: AtLeast0 = 0.0,
    ) -> None:
        parts = ([rule] if callable(rule) else rule for rule in rules)
        self.rules: list[Rule] = [rule for part in parts for rule in part]
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
        name: another name than the person's.
    """

    person: SimulatedAnnotator
    gold: Gold
    _: KW_ONLY
    seed: Seed
    position_bias: float = 0.0
    tie_below: AtLeast0 = 0.0
    name: str = ""
    kind: Kind = field(default="simulated", init=False)
    batch_size: int = field(default=1000, init=False)

    def __post_init__(self) -> None:
        """Check that there is a gold reward."""
        if not callable(self.gold):
            raise ValueError(f"{self.person.name} has no gold: set dataset.gold, or annotator=page")
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
        if abs(first - second + self.person.length_bias * words) < self.tie_below:
            choice = "tie"
        return labelled(self, pair, choice, order=order)


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
        raise AnnotationError(f"{annotator.name}: scores of pair {pair.pair_id} must be finite")
    choice: Choice = "tie" if gap == 0 or abs(gap) < tie_below else "first" if gap > 0 else "second"
    return labelled(annotator, pair, choice, margin=abs(gap))


def labelled(annotator: Annotator, pair: Pair, choice: Choice, **rest: Any) -> Label:
    """Return an annotator's label of now; `rest` are further fields, `order` "first" by default."""
    given: dict[str, Any] = {"order": "first", "created": now(), **rest}
    return Label(pair.pair_id, annotator.name, choice, annotator.kind, **given)


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
            raise AnnotationError(f"{annotator.name} must return one label per pair, in order")
        journal.append(labels)
        known |= {x.pair_id: x for x in labels}
    return [known[pair.pair_id] for pair in wanted]


def now() -> str:
    """Return the time as labels write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


STORE = "people.sqlite"


class PeopleNeededError(RuntimeError):
    """Labels of people are missing; the message says how to make them and how to continue."""


Asked = Sequence[tuple[Pair, int]]  # pairs, and how many people look at each


class People(Protocol):
    """Labels pairs, each by as many people as requested."""

    def labels(self, asked: Asked, folder: Path, journal: Journal[Label]) -> list[Label]:
        """Return the labels of (pair, number of people).

        Args:
            asked: pairs, and how many people each of them needs.
            folder: folder of the run.
            journal: journal of all labels, which gets the returned ones.

        Raises:
            PeopleNeededError: if people have to label first.
        """


class Panel:
    """Annotators that stand for people; each pair goes to some of them, chosen by a hash.

    Args:
        members: e.g. simulated people; their names differ. The keys of a mapping are not used.
        seed: seeds the choice of annotators.

    Raises:
        ValueError: if it is empty, or two have one name.
    """

    @checked
    def __init__(
        self, members: Sequence[Annotator] | Mapping[str, Annotator], *, seed: Seed
    ) -> None:
        members = list(members.values() if isinstance(members, Mapping) else members)
        names = [member.name for member in members]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a panel has members of different names, at least one: got {names}")
        self.members = tuple(members)
        self.seed = seed

    def labels(self, asked: Asked, folder: Path, journal: Journal[Label]) -> list[Label]:
        """Return the labels, pair by pair for each member.

        Raises:
            ValueError: if a pair needs more people than there are.
        """
        names = [member.name for member in self.members]
        shares: dict[str, list[Pair]] = defaultdict(list)
        for pair, count in asked:
            if count > len(names):
                keys = "budget.people_votes or budget.validation_votes"
                raise ValueError(f"{keys} is {count}, the panel has {len(names)}: add members")
            drawn = sorted(names, key=lambda n: split_fraction(f"{n}/{pair.pair_id}", self.seed))
            for name in drawn[:count]:
                shares[name].append(pair)
        own = (label_pairs(member, shares[member.name], journal) for member in self.members)
        return [label for labels in own for label in labels]


class PageAnnotators:
    """People at the labelling page, who share the store `people.sqlite` of the run folder.

    A first call puts the pairs into the store and says how to open the page; a later one takes the
    labels out of it.
    """

    def labels(self, asked: Asked, folder: Path, journal: Journal[Label]) -> list[Label]:
        """Return the labels of people, once every pair has as many as it needs; a skip is none.

        Raises:
            PeopleNeededError: while labels are missing.
        """
        from rlhf_lightning.preferences.annotation.store import LabelStore

        wanted = {pair.pair_id: count for pair, count in asked}
        by_count: dict[int, list[Pair]] = defaultdict(list)
        for pair, count in asked:
            by_count[count].append(pair)
        with LabelStore(folder / STORE) as store:
            for count, pairs in sorted(by_count.items(), reverse=True):
                store.add_pairs(pairs, labels_per_pair=count)
            given = [x for x in store.labels() if x.kind == "person" and x.pair_id in wanted]
        counts = Counter(label.pair_id for label in given if label.choice != "skip")
        missing = sum(max(count - counts[pair_id], 0) for pair_id, count in wanted.items())
        if missing:
            told = f"{missing} of {sum(wanted.values())} labels by people are missing. Label with  "
            told += f"python -m rlhf_lightning.annotate store={folder / STORE}  and then repeat "
            raise PeopleNeededError(f"{told}the command of this run with resume=auto")
        known = {(x.pair_id, x.annotator) for x in journal.read()}
        journal.append([x for x in given if (x.pair_id, x.annotator) not in known])
        return given


_WORD = re.compile(r"\w+")


# (prompt, response) -> a score; the better of two responses has the higher one.
Rule = Callable[[str, str], float]


@checked
@dataclass(frozen=True)
class LengthRule:
    """Prefers responses of about so many words: minus the log of the factor between the two."""

    words: Count
    weight: float = 1.0

    def __call__(self, prompt: str, response: str) -> float:
        """Return 0 at the wanted length, -log 2 at half and at twice of it."""
        count = max(len(_WORD.findall(response.lower())), 1)
        return -self.weight * abs(math.log(count / self.words))


@checked
@dataclass(frozen=True)
class RepetitionRule:
    """Dislikes repetitive responses: minus the share of word pairs that came before."""

    weight: float = 1.0

    def __call__(self, prompt: str, response: str) -> float:
        """Return 0 for a response whose neighbouring words are always new, down to -weight."""
        pairs = list(pairwise(_WORD.findall(response.lower())))
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


@checked
@dataclass(frozen=True)
class PhraseRule:
    """Counts phrases, whole words and any case.

    Args:
        phrases: phrases to count.
        weight: weight of each find; negative for phrases that make a response worse.
    """

    phrases: Names
    weight: float

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
        if isinstance(self.function, str):
            object.__setattr__(self, "function", load_function(self.function))

    def __call__(self, prompt: str, response: str) -> float:
        """Return the weight times what the function says.

        Raises:
            ValueError: if that is no finite number.
        """
        value = self.function(prompt, response)  # type: ignore[operator]
        if not isinstance(value, SupportsFloat) or not math.isfinite(value):
            name = getattr(self.function, "__name__", "function")
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
