"""The files of a folder by split: named, numbered, or as `datasets` saves them."""

from __future__ import annotations

import re
from pathlib import Path

from rlhf_lightning.data.errors import BadRecordError, Location
from rlhf_lightning.data.files import ENDINGS, extension, is_data_file
from rlhf_lightning.runs.reading import read_json

TRAIN_NAMES = ("train",)
VALIDATION_NAMES = ("validation", "valid", "val", "dev", "test")
# -00000-of-00002, perhaps with the hash that the hub once wrote behind it, _0, -part-1.
_SHARD = re.compile(r"([-_]part)?[-_]([0-9]+)(-of-([0-9]+)(-[0-9a-f]{16})?)?$")


def split_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the train and the validation files of a folder, by the start of their names.

    A file is `train.<ext>`, or a shard such as `train-00000-of-00002.parquet`, in the folder or in
    its `data/`. The validation files are those of the first of `validation`, `valid`, `val`, `dev`
    and `test` that exists, and may be none. A folder of shards alone, and what `save_to_disk` of a
    Dataset wrote, is all for training; of a DatasetDict the splits are named.

    Raises:
        BadRecordError: if there is no train file, or several that are not shards of one set.
    """
    try:
        if (folder / "dataset_dict.json").is_file():
            return _saved_splits(folder)
        if (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
            return _saved_files(folder), []
    except (OSError, KeyError, TypeError) as error:
        found = f"what save_to_disk wrote there cannot be read ({error!r})"
        raise BadRecordError(Location(str(folder)), found, "save it anew") from error
    places = [folder, folder / "data"]
    files = sorted(p for place in places for p in place.glob("*") if is_data_file(p))
    train, validation = _files_named(files, TRAIN_NAMES), _files_named(files, VALIDATION_NAMES)
    stems = [(path.name[: -len(extension(path))], extension(path)) for path in files]
    numbered = all(_SHARD.search(stem) for stem, _ in stems) and _are_shards(stems)
    if not train and not validation and numbered:
        train = files
    if not train:
        found = ", ".join(p.name for p in files[:8]) or "none"
        raise BadRecordError(
            Location(str(folder)),
            f"the folder has no train file (data files found: {found})",
            f"name one train.<ext> with <ext> of {ENDINGS}, or give the file itself",
        )
    return train, validation


def _saved_splits(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of a DatasetDict that `save_to_disk` wrote.

    Raises:
        BadRecordError: if it has no split to train on.
    """
    splits = read_json(folder / "dataset_dict.json")["splits"]
    names = [next((s for s in of if s in splits), None) for of in (TRAIN_NAMES, VALIDATION_NAMES)]
    if names[0] is None:
        found = f"the DatasetDict has no split train (found: {', '.join(splits)})"
        raise BadRecordError(Location(str(folder)), found, f"give {folder}/SPLIT")
    train, validation = ([] if s is None else _saved_files(folder / Path(s).name) for s in names)
    return train, validation


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of a Dataset that `save_to_disk` wrote, in the order of their rows."""
    files = read_json(folder / "state.json")["_data_files"]
    return [folder / Path(file["filename"]).name for file in files]


def _files_named(files: list[Path], names: tuple[str, ...]) -> list[Path]:
    for name in names:
        starts = (f"{name}-", f"{name}_")
        stems = {path: path.name[: -len(extension(path))] for path in files}
        found = [p for p in files if stems[p] == name or stems[p].startswith(starts)]
        if not _are_shards([(stems[path], extension(path)) for path in found]):
            raise BadRecordError(
                Location(str(found[0].parent)),
                f"these are no shards of one set: {', '.join(path.name for path in found)}",
                "give the file that is meant, or a folder that holds nothing but its shards, "
                "numbered from 0 or 1 without gaps",
            )
        if found:
            return found
    return []


def _are_shards(files: list[tuple[str, str]]) -> bool:
    """Return whether files, by stem and extension, are one file or all shards of one set.

    Shards are numbered from 0 or 1 without a gap, or `-of-` how many; what else is numbered is a
    version or a year.
    """
    if len(files) < 2:
        return True
    sets, numbers = set(), []
    for stem, ending in files:
        match = _SHARD.search(stem)
        if match is None:
            return False
        sets.add((stem[: match.start()], match[1], match[4], ending))
        numbers.append(int(match[2]))
    first = min(numbers)
    in_a_run = first in (0, 1) and sorted(numbers) == list(range(first, first + len(numbers)))
    said = all(total for _, _, total, _ in sets) and len(set(numbers)) == len(numbers)
    return len(sets) == 1 and (in_a_run or said)
