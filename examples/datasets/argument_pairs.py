"""Preference pairs from people who judged which of two arguments is more convincing.

Made for UKPConvArg1, whose arguments take a side in a debate; any two files of the same form do.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf_lightning.arguments import PathOrName, checked
from rlhf_lightning.data.errors import BadRecordError, Location, closest, describe
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    PromptRecord,
    Record,
    RecordKind,
    Split,
    Text,
    check_split,
)

Gold = Literal["a1", "a2", "equal"]
GOLD_VALUES = ("a1", "a2", "equal", None)
PUBLIC_SOURCE = "UKPConvArg1 (github.com/UKPLab/acl2016-convincing-arguments)"
TIE = "tie: people found neither more convincing"
NO_MAJORITY = "no majority among the votes"
SAME_TEXT = "both arguments have the same text"
STRICT = "strict"


class Argument(NamedTuple):
    """A text that takes a side in a debate."""

    side: str
    text: str


@dataclass(frozen=True)
class JudgedPair:
    """Two arguments for one side of a debate, and people's votes on them.

    Args:
        topic: debate and side, `<debate>_<side>`, as the file names them.
        title: title of the debate.
        first: the argument that votes call `a1`.
        second: the argument that votes call `a2`.
        gold: the more convincing one by the set's own estimate, `"equal"`, or None without one.
        strict: whether the set counts it among those that contradict no other pair.
        votes: `a1`, `a2` or `equal`, one a person.
        voters: voters, in the same order.
    """

    topic: str
    title: str
    first: Argument
    second: Argument
    gold: Gold | None
    strict: bool
    votes: tuple[str, ...]
    voters: tuple[str, ...] = ()

    @property
    def left_out(self) -> str | None:
        """The reason why the pair is no preference; None if it is one."""
        if self.gold is None:
            return NO_MAJORITY
        if self.gold == "equal":
            return TIE
        return SAME_TEXT if self.first.text == self.second.text else None

    @property
    def margin(self) -> float:
        """Share of the votes for `gold` minus share for the other one, 0 if that is negative.

        The gold label weighs people by how far they agree with others, so it may contradict a bare
        count.
        """
        other = "a2" if self.gold == "a1" else "a1"
        count = Counter(self.votes)
        return max(count[str(self.gold)] - count[other], 0) / len(self.votes)


@checked
@dataclass(frozen=True)
class ArgumentPairSource:
    """Preferences for the more convincing of two arguments for one side of a debate.

    The folder holds `pairs.jsonl` (`topic`, `title`, `arg1`, `arg2`, `gold`: a1, a2, equal or null,
    `strict`, `votes`: lists of which the second entry is a1, a2 or equal) and `arguments.jsonl`
    (`id`, `topic`, `stance`, `text`), either of them perhaps `.gz`. Whole debates, all sides of
    them, are held out, so that no argument and no debate is in both splits.

    A tie is left out: a pairwise loss has no use for it, and here it says that people differ, not
    that two texts are alike. So are pairs without a majority and pairs of one text. `left_out`
    counts them.

    Args:
        path: folder of the files.
        held_out: debates for validation; a debate is the part of `topic` before its `_`.
        margin_scale: margin of a pair on which all agree, in units of the reward; the margin of
            another is its share of votes for minus that against, times this.
        chat: make conversations, for a tokenizer with a chat template, and not plain text.

    Raises:
        ValueError: if the path is missing, or `margin_scale` is negative.

    Source: Habernal and Gurevych 2016, "Which argument is more convincing?".
    """

    path: PathOrName | None = None
    held_out: Sequence[str] = field(default_factory=tuple)
    margin_scale: float = 1.0
    chat: bool = False

    def __post_init__(self) -> None:
        """Check the arguments, and that the folder exists."""
        if self.path is None or not Path(self.path).expanduser().is_dir():
            found = "no path was given" if self.path is None else "there is no such folder"
            raise ValueError(
                f"path={self.path}: {found}. Give dataset.path=FOLDER with pairs.jsonl.gz and "
                f"arguments.jsonl.gz, e.g. of {PUBLIC_SOURCE}"
            )
        if not self.margin_scale >= 0:
            raise ValueError(f"margin_scale={self.margin_scale} must be 0 or more")

    def records(self, kind: RecordKind, split: Split) -> list[Record]:
        """Return the records of a kind and split, in the order of the files.

        * preferences: the more convincing argument over the other one; strict pairs belong to the
          subset "strict", and the topic is the domain.
        * demonstrations: each argument, as the response to its side's prompt.
        * prompts: one for each side of each debate.

        Raises:
            BadRecordError: for a row that cannot be read, or an unknown debate in `held_out`.
            ValueError: for another kind or split.
        """
        pairs = self.pairs(split)
        if kind == "preferences":
            return [self._preference(pair) for pair in pairs if pair.left_out is None]
        if kind == "prompts":
            sides = {pair.topic: pair for pair in pairs}
            return [PromptRecord(self._prompt(pair), topic) for topic, pair in sides.items()]
        if kind == "demonstrations":
            texts = {(a.text, p.topic): p for p in pairs for a in (p.first, p.second)}
            return [
                DemonstrationRecord(self._prompt(pair), self._answer(text), topic)
                for (text, topic), pair in texts.items()
            ]
        raise ValueError(
            f"kind={kind!r} is not in this set: use 'preferences', 'prompts' or 'demonstrations'"
        )

    def left_out(self, kind: RecordKind, split: Split) -> Mapping[str, int]:
        """Return how many pairs are no preference, by reason; nothing for another kind."""
        if kind != "preferences":
            return {}
        return Counter(pair.left_out for pair in self.pairs(split) if pair.left_out is not None)

    def pairs(self, split: Split) -> tuple[JudgedPair, ...]:
        """Return the judged pairs of a split, ties and all.

        Raises:
            ValueError: if there is no such split.
        """
        check_split(split)
        held_out = split == "validation"
        return tuple(p for p in self._pairs if (debate(p.topic) in self.held_out) == held_out)

    @cached_property
    def _pairs(self) -> tuple[JudgedPair, ...]:
        arguments: dict[str, Argument] = {}
        for where, row in _rows(self._file("arguments")):
            values = _texts(row, ("id", "stance", "text"), where)
            arguments[values["id"]] = Argument(values["stance"], values["text"].strip())
        path = self._file("pairs")
        pairs = tuple(_judged_pair(row, arguments, where) for where, row in _rows(path))
        known = sorted({debate(pair.topic) for pair in pairs})
        for name in self.held_out:
            if name not in known:
                hint = closest(name, known)
                meant = f"did you mean {hint!r}? " if hint else ""
                found = f"held_out names the debate {name!r}, which is not there"
                raise BadRecordError(Location(str(path)), found, f"{meant}It has {known}")
        if set(known) == set(self.held_out):
            found = "held_out names every debate, which leaves none to train on"
            raise BadRecordError(Location(str(path)), found, "hold out fewer")
        return pairs

    def _file(self, name: str) -> Path:
        folder = Path(str(self.path)).expanduser()
        plain = folder / f"{name}.jsonl"
        return plain if plain.exists() else folder / f"{name}.jsonl.gz"

    def _preference(self, pair: JudgedPair) -> PreferenceRecord:
        better, worse = pair.first.text, pair.second.text
        if pair.gold == "a2":
            better, worse = worse, better
        return PreferenceRecord(
            self._prompt(pair),
            self._answer(better),
            self._answer(worse),
            domain=pair.topic,
            margin=pair.margin * self.margin_scale,
            subsets=(STRICT,) if pair.strict else (),
        )

    def _prompt(self, pair: JudgedPair) -> Text:
        text = f"Debate: {pair.title}\nSide taken: {pair.first.side}\nArgument:"
        if not self.chat:
            return text
        request = "Argue for one side of a debate, so that readers are convinced."
        text = text.removesuffix("\nArgument:")
        return ({"role": "user", "content": f"{request}\n{text}"},)

    def _answer(self, text: str) -> Text:
        # The space belongs to the next word in BPE, so a plain response has it.
        return ({"role": "assistant", "content": text},) if self.chat else f" {text}"


def debate(topic: str) -> str:
    """Return the debate of a topic `<debate>_<side>`, without the dashes at its end."""
    return topic.partition("_")[0].rstrip("-")


def _rows(path: Path) -> Iterator[tuple[Location, dict[str, Any]]]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            yield Location(str(path), number), json.loads(line)


def _judged_pair(
    row: Mapping[str, Any], arguments: Mapping[str, Argument], where: Location
) -> JudgedPair:
    values = _texts(row, ("topic", "title", "arg1", "arg2"), where)
    gold = row.get("gold")
    if gold not in GOLD_VALUES:
        found = f"the key 'gold' holds {describe(gold)}, expected a1, a2, equal or null"
        raise BadRecordError(where, found, "mend the label, or leave the pair out")
    for key in ("arg1", "arg2"):
        if values[key] not in arguments:
            found = f"the key {key!r} names {values[key]!r}, which is no argument's id"
            raise BadRecordError(where, found, "add it to arguments.jsonl")
    return JudgedPair(
        values["topic"],
        values["title"],
        arguments[values["arg1"]],
        arguments[values["arg2"]],
        gold,
        row.get("strict") is True,
        _votes(row, where),
        tuple(str(vote[0]) for vote in row["votes"]),
    )


def _votes(row: Mapping[str, Any], where: Location) -> tuple[str, ...]:
    votes = row.get("votes")
    given = votes if isinstance(votes, list) else []
    values = tuple(v[1] for v in given if isinstance(v, list) and len(v) > 1)
    if not values or len(values) != len(given) or any(v not in GOLD_VALUES[:3] for v in values):
        found = f"the key 'votes' holds {describe(votes)}"
        fix = 'write a list of ["who", "a1", "why"], the second a1, a2 or equal'
        raise BadRecordError(where, found, fix)
    return values


def _texts(row: Mapping[str, Any], keys: Sequence[str], where: Location) -> dict[str, str]:
    """Return the texts under `keys`, all of which must be there and hold something."""
    for key in keys:
        if not isinstance(row.get(key), str) or not row[key].strip():
            found = f"the key {key!r} holds {describe(row.get(key))}, expected text"
            raise BadRecordError(where, found, "fill it, or leave the row out")
    return {key: row[key] for key in keys}
