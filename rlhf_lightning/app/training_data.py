"""The data that models were trained on, as far as their runs are known and still there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

from rlhf_lightning.app.config.compose import ConfigError, texts
from rlhf_lightning.app.config.inherit import read_training
from rlhf_lightning.app.config.saved import working_folder
from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.files import split_files
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import ManifestError, content_digest, read_manifest

_FILES = re.compile(r"\.(path|also\.\d+)$")  # settings that name files to train on


def training_runs(models: Iterable[str]) -> Iterator[RunFolder]:
    """Yield the runs that trained the models, as far as they are known and still there."""
    for model in models:
        yield RunFolder(Path(model).parent)  # of its export/
        with suppress(ManifestError):
            yield RunFolder(Path(read_manifest(model, verify=False).run))


def trainings_on(
    files: Iterable[Path], part: tuple[str, str] | None, runs: Iterable[RunFolder]
) -> Iterator[tuple[RunFolder, str, bool]]:
    """Yield run, data, and whether all of them were learnt, of each training on the same data.

    Args:
        files: the data, or files of the same content.
        part: or name and split of a set of the hub.
        runs: runs that may have been trained on them.
    """
    given = {path.resolve() for path in files}
    digests = {content_digest(path) for path in given if path.exists()}
    for folder in runs:
        try:
            trained, begun = read_training(folder), working_folder(folder)
        except ConfigError:
            continue
        # Of a mix every source, and the pairs that take the place of the dataset's.
        named = dict(texts([trained.dataset.source.arguments, trained.data.arguments]))
        for place in (key.removesuffix("name") for key in named if key.endswith(".name")):
            name, split = named[f"{place}name"], named.get(f"{place}split", "train")
            if part is not None and name == part[0] and share_rows(split, part[1]):
                yield folder, f"{name} [{split}]", f"{place}validation_split" in named
        for key in filter(_FILES.search, named):
            path = begun / named[key]
            learnt, whole = _learnt(path, named.get(key.removesuffix("path") + "validation_path"))
            same = any(one.is_file() and content_digest(one) in digests for one in learnt)
            if same or any(file.is_relative_to(one) for file in given for one in learnt):
                yield folder, str(path), whole or not key.endswith("path")


def share_rows(split: str, other: str) -> bool:
    """Return whether two splits of a set of the hub may share rows; two slices of one do not."""
    pairs = product(
        *([each.strip().partition("[") for each in x.split("+")] for x in (split, other))
    )
    return any(
        "all" in (one[0], two[0]) or (one[0] == two[0] and (one == two or not (one[1] and two[1])))
        for one, two in pairs
    )


def _learnt(path: Path, held_out: str | None) -> tuple[set[Path], bool]:
    """Return the files of a path that are trained on, and whether other files are held out."""
    try:
        train, others = split_files(path) if path.is_dir() else ([path], [])
    except BadRecordError:  # of a source with rules of its own
        train, others = [path], []
    return {file.resolve() for file in train}, bool(others or held_out)
