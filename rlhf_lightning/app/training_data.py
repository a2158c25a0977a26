"""The data that models were trained on, as far as their runs are known and still there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_lightning.app.config.compose import ConfigError, texts
from rlhf_lightning.app.config.inherit import read_training
from rlhf_lightning.app.config.saved import working_folder
from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.files import split_files
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import ManifestError, content_digest, read_manifest

_FILES = re.compile(r"\.(path|also\.\d+)$")  # settings that name files to train on


class Training(NamedTuple):
    """A training on some data.

    Args:
        run: folder of the run.
        data: path, or name and split.
        is_whole: whether all of the data were learnt.
        seed: of the split by prompt; None where it is not known.
        fraction: share of the prompts that it held out.
    """

    run: RunFolder
    data: str
    is_whole: bool
    seed: int | None
    fraction: float


def training_runs(models: Iterable[str]) -> Iterator[RunFolder]:
    """Yield the runs that trained the models, as far as they are known and still there."""
    for model in models:
        yield RunFolder(Path(model).parent)  # of its export/
        with suppress(ManifestError):
            yield RunFolder(Path(read_manifest(model, verify=False).run))


def trainings_on(
    files: Iterable[Path], part: tuple[str, str] | None, runs: Iterable[RunFolder]
) -> Iterator[Training]:
    """Yield each training on the same data.

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
        nodes: list[Any] = [trained.dataset.source.arguments, trained.data.arguments]
        named = dict(texts(nodes))
        for place in (key.removesuffix("name") for key in named if key.endswith(".name")):
            name, split = named[f"{place}name"], named.get(f"{place}split", "train")
            if part is not None and name == part[0] and share_rows(split, part[1]):
                whole = f"{place}validation_split" in named
                yield _training(folder, f"{name} [{split}]", whole, nodes, place)
        for key in filter(_FILES.search, named):
            path = begun / named[key]
            learnt, whole = _learnt(path, named.get(key.removesuffix("path") + "validation_path"))
            same = any(one.is_file() and content_digest(one) in digests for one in learnt)
            if same or any(file.is_relative_to(one) for file in given for one in learnt):
                is_path = key.endswith("path")
                place = key.removesuffix("path") if key.startswith("0.") else "0."
                yield _training(folder, str(path), whole or not is_path, nodes, place)


def _training(run: RunFolder, data: str, whole: bool, nodes: Any, place: str) -> Training:
    """Return a training whose data are split as the source at `place` is."""
    for part in place.split(".")[:-1]:
        nodes = nodes[int(part) if isinstance(nodes, list) else part]
    fraction = nodes.get("validation_fraction")
    if fraction is None:
        return Training(run, data, whole, None, 0.0)
    return Training(run, data, whole or fraction == 0, nodes.get("seed"), fraction)


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
