"""People who label: simulated ones at once, real ones when they have been at the page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rlhf_lightning.arguments import Seed, checked
from rlhf_lightning.data.splits import split_fraction
from rlhf_lightning.preferences.annotators import Annotator, label_pairs
from rlhf_lightning.preferences.journal import Journal
from rlhf_lightning.preferences.records import Label, Pair

STORE = "people.sqlite"


class PeopleNeededError(RuntimeError):
    """Labels of people are missing; the message says how to make them and how to continue."""


class People(Protocol):
    """Labels pairs, each by as many people as requested."""

    def labels(
        self, asked: Sequence[tuple[Pair, int]], folder: Path, journal: Journal[Label]
    ) -> list[Label]:
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

    def labels(
        self, asked: Sequence[tuple[Pair, int]], folder: Path, journal: Journal[Label]
    ) -> list[Label]:
        """Return the labels, pair by pair for each member.

        Raises:
            ValueError: if a pair needs more people than there are.
        """
        shares = self.shares(asked)
        return [
            label
            for member in self.members
            for label in label_pairs(member, shares[member.name], journal)
        ]

    def shares(self, asked: Sequence[tuple[Pair, int]]) -> Mapping[str, list[Pair]]:
        """Return the pairs that each member looks at."""
        names = [member.name for member in self.members]
        shares: dict[str, list[Pair]] = defaultdict(list)
        for pair, count in asked:
            if count > len(names):
                raise ValueError(
                    f"{count} people are to look at a pair, the panel has {len(names)}: lower "
                    "budget.people_votes or budget.validation_votes, or add members"
                )
            drawn = sorted(names, key=lambda n: split_fraction(f"{n}/{pair.pair_id}", self.seed))
            for name in drawn[:count]:
                shares[name].append(pair)
        return shares


class PageAnnotators:
    """People at the labelling page, who share the store `people.sqlite` of the run folder.

    A first call puts the pairs into the store and says how to open the page; a later one takes the
    labels out of it.
    """

    def labels(
        self, asked: Sequence[tuple[Pair, int]], folder: Path, journal: Journal[Label]
    ) -> list[Label]:
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
            raise PeopleNeededError(
                f"{missing} of {sum(wanted.values())} labels by people are missing. Label with  "
                f"python -m rlhf_lightning.annotate store={folder / STORE}  and then repeat the "
                "command of this run with resume=auto"
            )
        known = {(x.pair_id, x.annotator) for x in journal.read()}
        journal.append([x for x in given if (x.pair_id, x.annotator) not in known])
        return given
