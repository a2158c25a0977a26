"""Where records come from: files, the hub, or several sources mixed by weight."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rlhf_lightning.data.errors import Location, OnBadRecord
from rlhf_lightning.data.files import LocatedRow, read_rows, split_files
from rlhf_lightning.data.records import PreferenceRecord, Record, RecordKind, Split, prompt_key
from rlhf_lightning.data.sources.rows import RowSource


class RecordSource(Protocol):
    """Anything that yields records of a kind for a split.

    It may also have `skipped_records`, messages about the bad records that were left out, and
    `left_out(kind, split)`, which counts by reason the good ones that are no record of that kind.
    """

    def records(self, kind: RecordKind, split: Split) -> list[Record]:
        """Return all records of `split` as `kind`, in a fixed order."""
        ...


class FileSource(RowSource):
    """Records of a .jsonl, .json, .csv or .parquet file, or of a folder with split files.

    The first three may be compressed: `.jsonl.gz`.

    Args:
        path: the file, or a folder with `train.<ext>` and perhaps `validation.<ext>`.
        columns: our name -> the file's name for it; null hides a column.
        validation_path: a file of held-out records; without one, the validation file of the
            folder, or else a share of the prompts.
        validation_fraction: that share of prompts; 0 for no validation.
        seed: of the split by prompt; the same seed holds out the same prompts in every stage.
        on_bad_record: `"raise"`, or `"skip"` to leave bad records out, counted and named.
        rendered: a chat template has written the texts already: special tokens that they spell
            are tokens. A row's own `rendered` comes first.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        columns: Mapping[str, str | None] | None = None,
        validation_path: str | Path | None = None,
        validation_fraction: float = 0.05,
        seed: int = 0,
        on_bad_record: OnBadRecord = "raise",
        rendered: bool = False,
    ) -> None:
        """Note where the records are; they are read at the first call of `records`."""
        super().__init__(
            str(path),
            columns=columns,
            validation_fraction=validation_fraction,
            seed=seed,
            on_bad_record=on_bad_record,
            rendered=rendered,
        )
        self.path = Path(path).expanduser()
        self.validation_path = Path(validation_path).expanduser() if validation_path else None

    def _rows(self, split: Split) -> Iterable[LocatedRow] | None:
        train: list[Path] = [self.path]
        validation: list[Path] = []
        if self.path.is_dir():
            train, validation = split_files(self.path)
        if self.validation_path is not None:
            validation = [self.validation_path]
        files = train if split == "train" else validation
        return (row for file in files for row in read_rows(file)) if files else None


class HubSource(RowSource):
    """Records of a data set on the Hugging Face hub, through `datasets`.

    Code that a data set ships is never run.

    Args:
        name: the data set, e.g. `trl-lib/ultrafeedback_binarized`, or a folder of one.
        config: the name of its configuration.
        split: the split to train on; slices such as `train[:1000]` work.
        validation_split: the held-out split; without one, a share of the prompts is held out.
        columns: our name -> the set's name for it; null hides a column.
        revision: a branch, tag or commit; give a commit for runs that can be repeated.
        validation_fraction: share of prompts held out where there is no `validation_split`.
        seed: of the split by prompt.
        on_bad_record: `"raise"`, or `"skip"` to leave bad records out, counted and named.
        rendered: a chat template has written the texts already: special tokens that they spell
            are tokens. A row's own `rendered` comes first.
    """

    def __init__(
        self,
        name: str,
        *,
        config: str | None = None,
        split: str = "train",
        validation_split: str | None = None,
        columns: Mapping[str, str | None] | None = None,
        revision: str | None = None,
        validation_fraction: float = 0.05,
        seed: int = 0,
        on_bad_record: OnBadRecord = "raise",
        rendered: bool = False,
    ) -> None:
        """Note the name; the set is loaded at the first call of `records`."""
        super().__init__(
            name,
            columns=columns,
            validation_fraction=validation_fraction,
            seed=seed,
            on_bad_record=on_bad_record,
            rendered=rendered,
        )
        self.config = config
        self.hub_splits: dict[Split, str | None] = {"train": split, "validation": validation_split}
        self.revision = revision

    def _rows(self, split: Split) -> Iterable[LocatedRow] | None:
        hub_split = self.hub_splits[split]
        return None if hub_split is None else self._load_split(hub_split)

    def _load_split(self, hub_split: str) -> Iterator[LocatedRow]:
        if Path(self.name).expanduser().is_file():
            raise ValueError(
                f"the data set {self.name!r} is a file here and no name on the hub: read it with "
                f"dataset=files dataset.path={self.name} dataset.name=NAME (in Python FileSource)"
            )
        from datasets import load_dataset  # seconds to import: only those who ask pay

        try:
            rows: Any = load_dataset(
                self.name, name=self.config, split=hub_split, revision=self.revision
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the data set {self.name!r} (config={self.config}, split={hub_split!r}, "
                f"revision={self.revision}) could not be loaded: {error}. "
                "Check name, config and split, the network, and the access to a gated set"
            ) from error
        source = f"{self.name}[{hub_split}]"
        for number, row in enumerate(rows, start=1):
            yield Location(source, number, "row"), row


class MixedSource:
    """Several sources, mixed so that their shares of the training records match weights.

    The mix has as many training records as all sources together. A source that gets more than it
    has is repeated: every record `q` times, and a random part of them, drawn without replacement,
    once more. One that gets less gives a random part, each record at most once. Validation records
    are all those of all sources, not repeated. Prompts that stand in several sources are held out
    from all only if the sources split with the same seed.

    Args:
        sources: the sources.
        weights: one positive number a source; they need not sum to 1.
        seed: of the choice of records.

    Raises:
        ValueError: if there is not one finite positive weight a source.
    """

    def __init__(
        self, sources: Sequence[RecordSource], weights: Sequence[float], *, seed: int = 0
    ) -> None:
        """Check the weights; nothing is read yet."""
        if len(sources) != len(weights) or not sources:
            raise ValueError(
                f"{len(weights)} weights for {len(sources)} sources: give each source one weight"
            )
        if not all(0 < w < float("inf") for w in weights):
            raise ValueError(f"weights={list(weights)} must be finite and positive")
        self.sources = tuple(sources)
        self.weights = tuple(float(w) / sum(weights) for w in weights)
        self.seed = seed

    @property
    def skipped_records(self) -> tuple[str, ...]:
        """Messages about the bad records that the sources left out."""
        return tuple(m for s in self.sources for m in getattr(s, "skipped_records", ()))

    @property
    def num_repeated_keys(self) -> int:
        """Rows of JSON in the sources that have a key twice."""
        return sum(getattr(source, "num_repeated_keys", 0) for source in self.sources)

    def records(self, kind: RecordKind, split: Split) -> list[Record]:
        """Return the mixed records, source after source.

        Raises:
            ValueError: if a source has no record for training.
        """
        pools = [source.records(kind, split) for source in self.sources]
        if split == "validation":
            return [record for pool in pools for record in pool]
        for index, pool in enumerate(pools):
            if not pool:
                raise ValueError(f"source {index} of the mix has no {kind}: leave it out")
        counts = _shares(sum(len(pool) for pool in pools), self.weights)
        mixed: list[Record] = []
        for index, (pool, count) in enumerate(zip(pools, counts, strict=True)):
            repeats, rest = divmod(count, len(pool))
            drawn = random.Random(f"{self.seed}/{index}").sample(range(len(pool)), rest)
            mixed += pool * repeats + [pool[i] for i in sorted(drawn)]
        return mixed


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers that sum to `total` and lie within 1 of `total * weight`."""
    counts = [int(total * w) for w in weights]
    remainders = [total * w - c for w, c in zip(weights, counts, strict=True)]
    by_remainder = sorted(range(len(weights)), key=lambda i: -remainders[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


RELIABILITY = "reliability.json"


class PreferenceFolder(FileSource):
    """A folder that `rlhf_lightning.collect` wrote, or any file or folder of preference records.

    Where `reliability.json` stands in the folder and tells the ceiling of the validation labels,
    `label_ceiling()` returns it; else there is no such attribute.

    Args:
        path: of the folder or file.
        seed: of the split, where there is no validation file.
        validation_fraction: of the prompts, held out where there is no validation file.

    Raises:
        ValueError: if there is nothing at `path`.
    """

    def __init__(
        self, path: str | Path, *, seed: int = 1, validation_fraction: float = 0.05
    ) -> None:
        """Read what is known of the noise; records are read at the first call of `records`."""
        super().__init__(path, seed=seed, validation_fraction=validation_fraction)
        if not self.path.exists():
            raise ValueError(
                f"data.path={path} does not exist: give preference records (prompt, chosen, "
                "rejected), or make them with  python -m rlhf_lightning.collect"
            )
        ceiling = self._reliability().get("label_ceiling")
        if ceiling is not None:
            self.label_ceiling: Callable[[], float] = lambda: float(ceiling)

    def _reliability(self) -> dict[str, Any]:
        file = self.path / RELIABILITY
        if not file.is_file():
            return {}
        content = json.loads(file.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}


class FirstRecords:
    """The first training records of a source, repeated, in both splits.

    Validation asks for the same records, so that its loss shows what was learnt by heart too.

    Args:
        source: where the records come from.
        num_records: how many of them.
        num_copies: how often each occurs in training.

    Raises:
        ValueError: if a number is below 1.
    """

    def __init__(self, source: RecordSource, *, num_records: int, num_copies: int) -> None:
        for name, value in (("num_records", num_records), ("num_copies", num_copies)):
            if value < 1:
                raise ValueError(f"FirstRecords.{name}={value}, expected at least 1")
        self.source = source
        self.num_records = num_records
        self.num_copies = num_copies

    def records(self, kind: RecordKind, split: Split) -> list[Record]:
        """Return the first records, in training `num_copies` times, one pass after the other."""
        first = self.source.records(kind, "train")[: self.num_records]
        return first * self.num_copies if split == "train" else first


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


def as_source(source: RecordSource | str | Path) -> RecordSource:
    """Return a source: itself, or the records of a file, a folder, or a data set of the hub.

    Raises:
        FileNotFoundError: for a path, or a name with the ending of a file, that does not exist.
    """
    if not isinstance(source, str | Path):
        return source
    path = Path(source).expanduser()
    if path.exists():
        return FileSource(path)
    if isinstance(source, Path) or path.suffix:
        raise FileNotFoundError(
            f"{source} does not exist: give a .jsonl, .json, .csv or .parquet file, a folder, or "
            "the hub name of a data set"
        )
    return HubSource(source)
