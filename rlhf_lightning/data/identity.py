"""Digests of the data in a checkpoint, so that a resumed run continues with the same data."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np

from rlhf_lightning.data.encode import Encoded
from rlhf_lightning.data.files import is_data_file
from rlhf_lightning.data.records import RecordKind, Split
from rlhf_lightning.data.sources.base import FileSource, HubSource, RecordSource
from rlhf_lightning.data.sources.given import GivenRows
from rlhf_lightning.runs.manifest import content_digest

FILES = "files"


def data_digests(source: RecordSource, kind: RecordKind) -> dict[str, str]:
    """Return a SHA-256 of the content of each file that a source reads, by its path.

    A set of the hub and given rows have one of their records, by name. The built-in world has none:
    it is made from its seed.

    Args:
        source: source, perhaps made of others.
        kind: kind of the records.
    """
    found: dict[str, str] = {}
    for one in _all_of(source):
        if isinstance(one, HubSource | GivenRows):
            digest = hashlib.sha256()
            for split in get_args(Split):
                for record in one.records(kind, split):
                    digest.update(repr(record).encode())
            found[one.label] = digest.hexdigest()
        else:
            found |= {str(path): content_digest(path) for path in _files(one)}
    return found


def files_of(source: RecordSource) -> Iterator[Path]:
    """Yield the files of this machine that a source reads.

    The name of a set of the hub may be a folder here, which `datasets` then reads in its place.
    """
    for one in _all_of(source):
        if isinstance(one, HubSource):
            yield from (path for path in Path(one.name).expanduser().rglob("*") if path.is_file())
        else:
            yield from _files(one)


def _all_of(source: RecordSource) -> Iterator[RecordSource]:
    """Yield the sources that a source is made of, and itself."""
    for inner in (getattr(source, "source", None), *getattr(source, "sources", ())):
        if inner is not None:
            yield from _all_of(inner)
    yield source


def rows_digest(rows: Iterable[Encoded]) -> str:
    """Return a SHA-256 of the tokens, margins and columns of encoded rows, in their order.

    It covers what no file shows: the weights of a mix, columns, lengths, the seed of a split, and
    the columns that a custom source gives to a reward function.
    """
    digest = hashlib.sha256()
    for row in rows:
        for value in vars(row).values():
            if isinstance(value, np.ndarray):
                digest.update(f"{value.shape}".encode() + value.tobytes())
        digest.update(f"{getattr(row, 'margin', 0.0)}".encode())
        if (label := getattr(row, "label", None)) is not None:
            digest.update(f"label {label}".encode())
        columns = repr(sorted(getattr(row, "columns", {}).items()))
        digest.update(re.sub(r" at 0x[0-9a-fA-F]+>", ">", columns).encode())  # places in memory
    return digest.hexdigest()


def check_same_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that a run continues with the data that its checkpoint was made with.

    Files may have moved; values that an older checkpoint lacks are not compared.

    Args:
        saved: digests and numbers in the checkpoint.
        now: those of this run: `files`, and numbers by name.

    Raises:
        ValueError: if something differs, with its name.
    """
    before, files = saved.get(FILES), now[FILES]
    if before is not None and list(before.values()) != list(files.values()):
        changed = [name for name, digest in files.items() if digest not in before.values()]
        gone = [name for name, digest in before.items() if digest not in files.values()]
        what = ", ".join(changed or gone or files)
        raise ValueError(
            f"the checkpoint was made with other data: {what} has changed, or is another file. "
            "Restore the data, or start again with resume=never"
        )
    for name, value in now.items():
        if name != FILES and saved.get(name, value) != value:
            raise ValueError(
                f"the checkpoint was made with data {name}={saved[name]}, this run has {value}: "
                "the remaining batches would differ. Resume with the same data, or start again"
            )


def _files(source: RecordSource) -> list[Path]:
    if isinstance(source, FileSource):
        return [*source.files("train"), *source.files("validation")]
    named = (getattr(source, name, None) for name in ("path", "positive", "negative"))
    found: list[Path] = []
    for path in (Path(name).expanduser() for name in named if name is not None):
        found += sorted(filter(is_data_file, path.glob("*"))) if path.is_dir() else [path]
    return [path for path in found if path.is_file()]
