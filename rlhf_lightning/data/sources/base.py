"""Sources of records: rows of files and of the hub, and sources made of several."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, get_args

from pydantic import Field

from rlhf_lightning.arguments import (
    Above0,
    Count,
    Fraction,
    Line,
    Name,
    PathOrName,
    PathStr,
    Seed,
    checked,
)
from rlhf_lightning.data.errors import BadRecordError, Location, OnBadRecord, missing_file
from rlhf_lightning.data.files import LocatedRow, Row, read_rows, rows_of, split_files
from rlhf_lightning.data.formats import RowParser
from rlhf_lightning.data.kinds import NO_LABELS, TAKEN, Labels, to_kind
from rlhf_lightning.data.records import (
    PreferenceRecord,
    Record,
    RecordKind,
    Split,
    TextRecord,
    Value,
    check_split,
    first_of_each,
    kind_of,
    prompt_key,
    question_key,
    with_system_in_user,
)
from rlhf_lightning.data.splits import connected_keys, shares, split_by_key, warn_of_shared
from rlhf_lightning.runs.hub import unreachable_hub
from rlhf_lightning.runs.reading import read_json

NUM_NAMED_SKIPS = 5
logger = logging.getLogger(__name__)


class RecordSource(Protocol):
    """Anything that yields records of a kind for a split.

    It may also have `skipped_records`, messages about the bad records that were left out, and
    `left_out(kind, split)`, which counts by reason the good ones that are no record of that kind.
    """

    def records(self, kind: RecordKind, split: Split) -> list[Record]:
        """Return all records of `split` as `kind`, in a fixed order."""
        ...


@dataclass(eq=False, repr=False, kw_only=True)
class RowSource:
    """Parses rows once, splits them by prompt where there is no validation set, and converts.

    A subclass yields its rows in `_rows` and returns their parser in `_parser`.

    Args:
        columns: our name -> their name; null hides a column.
        validation_fraction: share of prompts held out where there is no validation set; 0 for no
            validation.
        seed: seeds the split by prompt; the same seed holds out the same prompts in every stage.
        on_bad_record: `"raise"`, or `"skip"` to leave bad records out, counted and named.
        rendered: a chat template has written the texts already: special tokens that they spell
            are tokens. A row's own `rendered` comes first.
        system_into_user: put system messages in front of the user's next one.
        label_good: value of the label that says that a response is good; None for true.
    """

    columns: Mapping[str, Name | None] | None = None
    validation_fraction: Fraction = 0.05
    seed: Seed = 1
    on_bad_record: OnBadRecord = "raise"
    rendered: bool = False
    system_into_user: bool = False
    label_good: Value | None = None

    def __post_init__(self) -> None:
        """Check the arguments; rows are read at the first call of `records`."""
        self._parser()  # checks the columns
        self._skipped: dict[str, None] = {}  # messages, each once
        self._splits: dict[Split, list[Record]] | None = None
        self.labels = NO_LABELS

    @property
    def label(self) -> str:
        """Name of the file or dataset, for messages."""
        raise NotImplementedError

    @property
    def skipped_records(self) -> tuple[str, ...]:
        """Messages about the bad records that were left out (of what was read so far)."""
        return tuple(self._skipped)

    def records(self, kind: RecordKind, split: Split) -> list[Record]:
        """Return all records of `split` as `kind`, in the order of the source.

        Prompts taken from demonstrations or preferences are made unique; a set of prompts is kept.
        Rows that are labelled bad are no demonstrations.

        Raises:
            BadRecordError: for a bad record unless it is skipped, or if the records cannot be
                turned into `kind`.
            ValueError: if `split` is unknown.
        """
        given = self.parsed(split)
        if kind == "prompts" and given and kind_of(given[0]) != "prompts":
            given = first_of_each(given, question_key)
        labels, records = self.labels, []
        if kind == "demonstrations" and "label" not in (self.columns or ()):
            labels.check_unread(given)
        for record in given:
            try:
                records += [self._placed(one, record) for one in to_kind(record, kind, labels)]
            except BadRecordError as error:
                # A set of the wrong kind is no bad record, and skipping would hide all of it.
                by_label = kind in ("demonstrations", "unpaired") and labels.column is not None
                if not (by_label or kind == "prompts") or kind_of(record) == "texts":
                    raise
                self._skip(error)
        return records

    def _placed(self, record: Record, row: Record) -> Record:
        """Return a record with what it is of a row, and what becomes of it if it is not written."""
        skip, unread = self.on_bad_record == "skip", self.labels.unread(record)
        own = isinstance(record, type(row))  # an unpaired one is a labelled demonstration
        taken = "" if own else f"{TAKEN[kind_of(record)]} of {kind_of(row)}"
        origin = replace(record.origin, taken=taken, skip=skip, unread=unread)
        record = replace(record, origin=origin)
        if self.system_into_user and not isinstance(record, TextRecord):
            return replace(record, prompt=with_system_in_user(record.prompt))
        return record

    def _skip(self, error: BadRecordError) -> None:
        """Note a bad record, or raise its error."""
        if self.on_bad_record != "skip":
            raise error
        self._skipped[str(error)] = None

    def parsed(self, split: Split) -> list[Record]:
        """Return a record for each row of a split, of whatever kind these are."""
        check_split(split)
        if self._splits is None:
            self._splits = self._load()
        return self._splits[split]

    def _load(self) -> dict[Split, list[Record]]:
        given = {split: self._rows(split) for split in get_args(Split)}
        splits: dict[Split, list[Record]] = {
            split: self._parsed(rows) for split, rows in given.items() if rows is not None
        }
        self.labels = self._find_labels([one for records in splits.values() for one in records])
        if "validation" in splits:
            self._warn_of_shared_prompts(**splits)
            return splits
        train = splits["train"]
        keys = [record.origin.group or prompt_key(record) for record in train]
        keys = connected_keys(keys, [record.origin.sides for record in train])
        share: dict[str, Any] = {"validation_fraction": self.validation_fraction, "seed": self.seed}
        train, held_out = split_by_key(train, keys, name=self.label, **share)
        return {"train": train, "validation": held_out}

    def _parsed(self, rows: Iterable[LocatedRow]) -> list[Record]:
        parse, num_before = self._parser(), len(self._skipped)
        records, where = list[Record](), Location(self.label)
        for where, row in rows:
            try:
                if isinstance(row, BadRecordError):
                    raise row
                records.append(parse(row, where))
            except BadRecordError as error:
                self._skip(error)
        bad = [*self._skipped][num_before:]
        if bad:
            told = "%s: skipped %d bad records, kept %d:\n  %s"
            named = "\n  ".join(bad[:NUM_NAMED_SKIPS])
            logger.warning(told, where.source, len(bad), len(records), named)
        if not records:
            found = f"no record is left: all {len(bad)} were bad"
            first = [*bad, "the source is empty"][0].removesuffix(".")
            fix = f"mend them; the first: {first}"
            raise BadRecordError(Location(where.source), found, fix)
        return records

    def _find_labels(self, records: Sequence[Record]) -> Labels:
        return Labels.of_records(records, self.columns or {}, self.label_good)

    def _warn_of_shared_prompts(self, train: list[Record], validation: list[Record]) -> None:
        held_out = {prompt_key(record) for record in validation}
        sides = {side for record in train for side in record.origin.sides}
        shared = held_out & {prompt_key(record) for record in train}
        shared |= {prompt_key(r) for r in validation if not sides.isdisjoint(r.origin.sides)}
        warn_of_shared(self.label, shared, len(held_out))

    def _parser(self) -> Callable[[Row, Location], Record]:
        return RowParser(self.columns, rendered=self.rendered)

    def _rows(self, split: Split) -> Iterable[LocatedRow] | None:
        """Return the rows of a split; None for a validation split where there is none."""
        raise NotImplementedError


@checked
@dataclass(eq=False, repr=False)
class FileSource(RowSource):
    """Records of a file, or of a folder with split files.

    Files are .jsonl, .json, .csv, .tsv, .parquet and .arrow, see `data.files`. Further arguments
    are those of `RowSource`.

    Args:
        path: the file, or a folder, see `files.split_files`.
        validation_path: a file of held-out records; without one, the validation file of the
            folder, or else a share of the prompts.

    Raises:
        ValueError: if no path was given.
    """

    path: PathOrName | None
    _: KW_ONLY
    validation_path: PathOrName | None = None

    def __post_init__(self) -> None:
        """Check the arguments; the files are read at the first call of `records`."""
        super().__post_init__()
        if self.path is None:
            raise ValueError("path=None: no path was given. Give dataset.path=FILE or a folder")

    @property
    def folder_or_file(self) -> Path:
        """The path, `~` expanded."""
        return Path(str(self.path)).expanduser()

    @property
    def label(self) -> str:
        """The path, for messages."""
        return str(self.path)

    def files(self, split: Split) -> list[Path]:
        """Return the files of a split; none for a validation split that is a share of the train."""
        path = self.folder_or_file
        train, validation = split_files(path) if path.is_dir() else ([path], [])
        if self.validation_path is not None:
            validation = [Path(self.validation_path).expanduser()]
        return train if split == "train" else validation

    def _rows(self, split: Split) -> Iterable[LocatedRow] | None:
        files = self.files(split)
        return (row for file in files for row in read_rows(file)) if files else None


@checked
@dataclass(eq=False, repr=False)
class HubSource(RowSource):
    """Records of a dataset on the Hugging Face hub, through `datasets`.

    Code in a dataset is never run. Further arguments are those of `RowSource`.

    Args:
        name: the dataset, e.g. `trl-lib/ultrafeedback_binarized`, or a folder of one.
        config: the name of its configuration.
        split: the split to train on; slices such as `train[:1000]` work.
        validation_split: the held-out split; without one, a share of the prompts is held out.
        revision: a branch, tag or commit; give a commit for runs that can be repeated.
    """

    on_hub: ClassVar = True  # `name` is one of the hub's, for model cards
    name: PathStr
    _: KW_ONLY
    config: str | None = None
    split: Name = "train"
    validation_split: Name | None = None
    revision: Line | None = None

    @property
    def label(self) -> str:
        """Name of the dataset, for messages."""
        return self.name

    def _rows(self, split: Split) -> Iterable[LocatedRow] | None:
        hub_split = self.split if split == "train" else self.validation_split
        return None if hub_split is None else self._load_split(hub_split)

    def _load_split(self, part: str) -> Iterator[LocatedRow]:
        if Path(self.name).expanduser().is_file():
            fix = f"dataset=files dataset.path={self.name} dataset.name=NAME (in Python FileSource)"
            raise ValueError(f"dataset {self.name!r} is a local file: read it with {fix}")
        away = None if Path(self.name).expanduser().is_dir() else unreachable_hub()
        from datasets import load_dataset  # seconds to import: only those who ask pay

        try:
            rows: Any = load_dataset(self.name, self.config, split=part, revision=self.revision)
        except (OSError, ValueError) as error:
            asked = f"config={self.config}, split={part!r}, revision={self.revision}"
            found = f"dataset {self.name!r} ({asked}) could not be loaded: {away or error}"
            fix = "Check name, config and split, the network, and the access to a gated set"
            raise ValueError(f"{found}. {fix}") from error
        for number, row in enumerate(rows_of(rows), start=1):
            yield Location(f"{self.name}[{part}]", number, "row"), row


class _SeveralSources:
    """A source made of others, and the notes of all of them."""

    sources: tuple[RecordSource, ...]

    @property
    def skipped_records(self) -> tuple[str, ...]:
        """Messages about the bad records that the sources left out."""
        return tuple(m for s in self.sources for m in getattr(s, "skipped_records", ()))

    def left_out(self, kind: RecordKind, split: Split) -> dict[str, int]:
        """Return how many good records are not used, by reason."""
        counts = (s.left_out(kind, split) for s in self.sources if hasattr(s, "left_out"))
        return dict(sum(map(Counter, counts), Counter()))


Sources = Annotated[Sequence[RecordSource], Field(min_length=1)]


class MixedSource(_SeveralSources):
    """Several sources, mixed so that their shares of the training records match weights.

    The mix has as many training records as all sources together. A source that gets more than it
    has is repeated: every record `q` times, and a random part of them, drawn without replacement,
    once more. One that gets less gives a random part, each record at most once. Validation records
    are all those of all sources, not repeated. A prompt that is in several sources is held out from
    all where they split with the same seed and fraction; a warning says what is trained on too.

    Args:
        sources: sources of one kind of record.
        weights: one positive number a source; they need not sum to 1.
        seed: seeds the choice of records.

    Raises:
        ValueError: if there is not one positive weight a source.
    """

    @checked
    def __init__(self, sources: Sources, weights: Sequence[Above0], *, seed: Seed = 0) -> None:
        """Check the weights; nothing is read yet."""
        if len(sources) != len(weights):
            raise ValueError(f"{len(weights)} weights for {len(sources)} sources: give one each")
        self.sources = tuple(sources)
        self.weights = tuple(float(w) / sum(weights) for w in weights)
        self.seed = seed

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
        held_out = {prompt_key(r) for s in self.sources for r in s.records(kind, "validation")}
        shared = held_out & {prompt_key(record) for pool in pools for record in pool}
        warn_of_shared("the mix", shared, len(held_out))
        counts = shares(sum(map(len, pools)), self.weights)
        mixed: list[Record] = []
        for index, (pool, count) in enumerate(zip(pools, counts, strict=True)):
            repeats, rest = divmod(count, len(pool))
            drawn = random.Random(f"{self.seed}/{index}").sample(range(len(pool)), rest)
            mixed += pool * repeats + [pool[i] for i in sorted(drawn)]
        return mixed


RELIABILITY = "reliability.json"


class PreferenceFolder(FileSource):
    """A folder that `rlhf_lightning.collect` wrote, or any file or folder of preference records.

    If the folder has a `reliability.json` with the ceiling of the validation labels,
    `label_ceiling()` returns it; else there is no such attribute. The arguments are those of
    `FileSource`.
    """

    def __post_init__(self) -> None:
        """Read what is known of the noise; records are read at the first call of `records`."""
        super().__post_init__()
        if not self.folder_or_file.exists():
            fix = "give preference records, or make them with python -m rlhf_lightning.collect"
            place = Location(f"data.path={self.path}")
            raise missing_file(place, self.folder_or_file, fix)
        file = self.folder_or_file / RELIABILITY
        ceiling = read_json(file).get("label_ceiling") if file.is_file() else None
        if ceiling is not None:
            self.label_ceiling: Callable[[], float] = lambda: float(ceiling)


class FirstRecords:
    """The first training records of a source, repeated, in both splits.

    Validation asks for the same records, so that its loss shows what was learnt by heart too.

    Args:
        source: where the records come from.
        num_records: how many of them.
        num_copies: how often each occurs in training.
    """

    @checked
    def __init__(self, source: RecordSource, *, num_records: Count, num_copies: Count) -> None:
        self.source = source
        self.num_records = num_records
        self.num_copies = num_copies

    def records(self, kind: RecordKind, split: Split) -> list[Record]:
        """Return the first records, in training `num_copies` times, one pass after the other."""
        first = self.source.records(kind, "train")[: self.num_records]
        return first * self.num_copies if split == "train" else first


class JoinedSource(_SeveralSources):
    """All records of all sources; what one of them holds out, none of them trains on.

    Validation records are those of all sources. A training record whose prompt is held out by any
    source is left out and counted, and so is one that says the same as an earlier one: a policy
    that has hardly changed gives the same responses in the next round.

    Validation records of the second and later sources are the subsets `source_2`, ..., so that
    accuracy is reported on each.

    Args:
        sources: sources, at least one.
    """

    @checked
    def __init__(self, sources: Sources) -> None:
        """Note the sources; they are read at the first call of `records`."""
        self.sources = tuple(sources)
        self._left_out: Counter[str] = Counter()

    def records(self, kind: RecordKind, split: Split) -> list[Record]:
        """Return the records of a split, source after source."""
        pools = [source.records(kind, split) for source in self.sources]
        if split == "validation":
            return [r if n == 1 else _named(r, n) for n, pool in enumerate(pools, 1) for r in pool]
        held_out = {prompt_key(record) for record in self.records(kind, "validation")}
        kept: list[Record] = []
        seen: set[str] = set()
        self._left_out = Counter()
        for pool in pools:
            own: set[str] = set()
            for record in pool:
                said = repr(record)
                if prompt_key(record) in held_out:
                    self._left_out["its prompt is held out by another source"] += 1
                elif said in seen:
                    self._left_out["said in an earlier source"] += 1
                else:
                    kept.append(record)
                    own.add(said)
            seen |= own
        return kept

    def left_out(self, kind: RecordKind, split: Split) -> dict[str, int]:
        """Return how many good records are not used, by reason."""
        own = self._left_out if split == "train" else {}
        return dict(Counter(own) + Counter(super().left_out(kind, split)))


def _named(record: Record, number: int) -> Record:
    if not isinstance(record, PreferenceRecord):
        return record
    return replace(record, subsets=(*record.subsets, f"source_{number}"))
