"""Preference records of several collections, one after the other: what each round adds stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rlhf_lightning.data.records import PreferenceRecord, Record, RecordKind, Split, prompt_key
from rlhf_lightning.data.sources import RecordSource


class JoinedSource:
    """All records of all sources; what one of them holds out, none of them trains on.

    Validation records are those of all sources. A training record whose prompt is held out by any
    source is left out and counted, and so is one that says the same as an earlier one: a policy
    that has hardly changed gives the same answers in the next round.

    `label_ceiling` is the mean of the sources' ceilings over the validation records, where every
    source that has some knows its own; else None. Validation records of the second and later
    sources are the subsets `source_2`, ..., so that accuracy is told on each.

    Args:
        sources: at least one.
    """

    def __init__(self, sources: Sequence[RecordSource]) -> None:
        """Note the sources; they are read at the first call of `records`."""
        self.sources = tuple(sources)
        self._left_out: dict[str, int] = {}

    @property
    def skipped_records(self) -> tuple[str, ...]:
        """Messages about the bad records that the sources left out."""
        return tuple(m for s in self.sources for m in getattr(s, "skipped_records", ()))

    @property
    def num_repeated_keys(self) -> int:
        """Rows of JSON in the sources that have a key twice."""
        return sum(getattr(source, "num_repeated_keys", 0) for source in self.sources)

    def records(self, kind: RecordKind, split: Split) -> list[Record]:
        """Return the records of a split, source after source."""
        pools = [source.records(kind, split) for source in self.sources]
        if split == "validation":
            return [record for n, pool in enumerate(pools, start=1) for record in _named(pool, n)]
        held_out = {prompt_key(record) for record in self.records(kind, "validation")}
        kept: list[Record] = []
        seen: set[str] = set()
        self._left_out = {}
        for number, pool in enumerate(pools):
            own = set()
            for record in pool:
                said = repr(record)
                if prompt_key(record) in held_out:
                    self._count("its prompt is held out by another source")
                elif number and said in seen:
                    self._count("said in an earlier source")
                else:
                    kept.append(record)
                    own.add(said)
            seen |= own
        return kept

    def left_out(self, kind: RecordKind, split: Split) -> dict[str, int]:
        """Return how many good records are not used, by reason."""
        found: dict[str, int] = dict(self._left_out) if split == "train" else {}
        for source in self.sources:
            for reason, count in getattr(source, "left_out", _none)(kind, split).items():
                found[reason] = found.get(reason, 0) + count
        return found

    def _count(self, reason: str) -> None:
        self._left_out[reason] = self._left_out.get(reason, 0) + 1

    @property
    def label_ceiling(self) -> Callable[[], float] | None:
        """Returns the expected accuracy of ranking the held-out pairs by the truth; or None."""
        found = []
        for source in self.sources:
            count = len(source.records("preferences", "validation"))
            ceiling = getattr(source, "label_ceiling", None)
            if count and ceiling is None:
                return None
            if count and ceiling is not None:
                found.append((count, float(ceiling())))
        total = sum(count for count, _ in found)
        mean = sum(count * value for count, value in found) / max(total, 1)
        return (lambda: mean) if total else None


def _named(pool: Sequence[Record], number: int) -> list[Record]:
    if number == 1:
        return list(pool)
    return [
        replace(r, subsets=(*r.subsets, f"source_{number}"))
        if isinstance(r, PreferenceRecord)
        else r
        for r in pool
    ]


def _none(kind: RecordKind, split: Split) -> dict[str, int]:
    return {}
