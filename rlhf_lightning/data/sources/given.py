"""The sources that a DataModule accepts: a source, a path, a name on the hub, or rows.

And the files that such a source reads, of all that it is made of.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rlhf_lightning.arguments import PathOrName, fitting
from rlhf_lightning.data.errors import Location, missing_file
from rlhf_lightning.data.files import ENDINGS, LocatedRow, as_row, is_data_file, rows_of
from rlhf_lightning.data.kinds import to_kind
from rlhf_lightning.data.records import Record, RecordKind, Split
from rlhf_lightning.data.sources.base import FileSource, HubSource, RecordSource, RowSource

Rows = Sequence[Mapping[str, Any]]  # or a `datasets.Dataset`, which is no Sequence to Python


@dataclass(eq=False, repr=False)
class GivenRows(RowSource):
    """Records of rows in memory, with the formats and checks of a file.

    Further arguments are those of `RowSource`.

    Args:
        rows: mappings of column names to values.
        name: name of the argument that they were given as.
    """

    rows: Rows
    name: str = "source"

    @property
    def label(self) -> str:
        """The type of the rows, for messages."""
        return f"the {type(self.rows).__name__} that was given"

    def _rows(self, split: Split) -> Iterable[LocatedRow] | None:
        if split != "train":
            return None
        source = f"{self.name}, {self.label}"
        rows = enumerate(rows_of(self.rows), start=1)
        numbered = ((Location(source, n, "row"), row) for n, row in rows)
        return ((where, as_row(row, where)) for where, row in numbered)

    def prompts(self) -> list[Record]:
        """Return the prompt of every row, also of those that share one."""
        return [asked for row in self.parsed("train") for asked in to_kind(row, "prompts")]


class WholeSource:
    """All records of a source as held-out ones: nobody trains on a test set.

    Args:
        source: source that has not been read yet.
    """

    def __init__(self, source: RecordSource) -> None:
        """Note the source; it is read at the first call of `records`."""
        self.source = copy.copy(source)
        if isinstance(self.source, RowSource):
            self.source.validation_fraction = 0.0

    def records(self, kind: RecordKind, split: Split) -> list[Record]:
        """Return all records for `validation`, none for `train`."""
        if split == "train":
            return []
        return [*self.source.records(kind, "train"), *self.source.records(kind, "validation")]

    def num_rows(self) -> int:
        """Return how many rows there are, bad ones included; several may have one prompt."""
        if not isinstance(self.source, RowSource):
            return len(self.records("prompts", "validation"))
        parsed = sum(len(self.source.parsed(split)) for split in ("train", "validation"))
        return parsed + len(self.source.skipped_records)


def nested_sources(source: Any) -> Iterator[Any]:
    """Yield the sources that a source is made of, and the source itself."""
    for inner in (getattr(source, "source", None), *getattr(source, "sources", ())):
        if inner is not None:
            yield from nested_sources(inner)
    yield source


def files_of(source: RecordSource) -> Iterator[Path]:
    """Yield the files of this machine that a source reads, or the sources that it is made of.

    The name of a set of the hub may be a folder here, which `datasets` then reads in its place.
    """
    for one in nested_sources(source):
        if isinstance(one, FileSource):
            yield from (file for split in get_args(Split) for file in one.files(split))
        elif isinstance(one, HubSource):
            yield from filter(Path.is_file, Path(one.name).expanduser().rglob("*"))
        else:
            places = (getattr(one, key, None) for key in ("path", "positive", "negative"))
            for path in (Path(place).expanduser() for place in places if place):
                inside = sorted(filter(is_data_file, path.glob("*")))
                yield from filter(Path.is_file, (path, *inside))


def as_source(source: RecordSource | Rows | str | Path, name: str = "source") -> RecordSource:
    """Return a source: itself, or the records of rows, a file, a folder, or a set of the hub.

    Args:
        source: argument of the user.
        name: name of the argument, for errors.

    Raises:
        MissingFileError: for a path, or a name with the ending of a file, that does not exist: a
            BadRecordError, as other faults of a source are, and a FileNotFoundError.
        TypeError: if it is none of these.
        ValueError: if it is empty.
    """
    if isinstance(source, str | Path):
        return _named(fitting(name, source, PathOrName), name)
    is_one = isinstance(source, str | bytes | Mapping) or getattr(source, "shape", None) == ()
    if isinstance(source, Sized) and not is_one and not len(source):
        raise ValueError(f"{name}={source!r} has no row: give at least one")
    if callable(getattr(source, "records", None)):
        return source  # type: ignore[return-value]
    # A pandas.DataFrame has a length too, and iterates over the names of its columns.
    sized = hasattr(source, "__len__") and hasattr(source, "__getitem__") and not is_one
    if sized and isinstance(next(iter(source), None), Mapping):  # type: ignore[call-overload, arg-type]
        return GivenRows(source, name)  # type: ignore[arg-type]
    wanted = "a file, a folder, a name on the hub, a list of dict, a datasets.Dataset, or a source"
    fix = "give one value of a dict of splits, and list(stream) for a stream"
    raise TypeError(f"{name} is {type(source).__name__}, expected {wanted}: {fix}")


def _named(source: str | Path, name: str) -> RecordSource:
    path = Path(source).expanduser()
    if path.exists():
        return FileSource(path)
    if isinstance(source, Path) or path.suffix:
        fix = f"give a folder, a name on the hub, or one file that ends with {ENDINGS}"
        where = Location(f"{name}={source}")
        raise missing_file(where, path, fix)
    return HubSource(source)


def as_prompt_rows(prompts: Any) -> list[Mapping[str, Any]]:
    """Return prompts, which are texts, conversations or rows, as rows with the key `prompt`.

    Raises:
        TypeError: if they are one prompt, none, or a table, which gives the names of its columns.
    """
    shape = getattr(prompts, "shape", (1,))
    is_one = isinstance(prompts, str | bytes | Mapping) or shape == ()
    given = list(prompts) if isinstance(prompts, Iterable) and not is_one else []
    if not given or (len(shape) > 1 and not isinstance(given[0], Mapping)):
        got = f"{repr(prompts)[:100]} is {type(prompts).__name__}"
        fix = "give [prompt], or one column of a table"
        raise TypeError(f"prompts={got}, expected a list of at least one prompt: {fix}")
    return [one if isinstance(one, Mapping) else {"prompt": one} for one in given]


def of_collated_rows(batch: Any) -> Any:
    """Return the prompts of a loader's batch: it may be one, or rows put together by column."""
    texts = batch.get("prompt") if isinstance(batch, Mapping) else None
    if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
        return texts
    return [batch] if isinstance(batch, str | Mapping) else batch
