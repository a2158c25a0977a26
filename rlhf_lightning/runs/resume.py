"""The run to continue and its newest complete checkpoint, read as data."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import is_claimed
from rlhf_lightning.runs.summary import summary_or_none

logger = logging.getLogger(__name__)

# What does not change what is learnt: a run continues with another value of these.
_LEFT_OUT = {"resume", "ckpt_path", "export", "paths", "logger", "hydra"}
_LEFT_OUT |= {"data.validation_batch_size"}
for _group, _keys in {
    "trainer": "devices num_nodes enable_progress_bar enable_model_summary default_root_dir",
    "callbacks.checkpoint": "every_n_iterations every_minutes keep_last",
    "judge": "api_key_env concurrency input_price max_completion_tokens max_cost max_retries "
    "max_tokens output_price timeout",
    "strategy": "name timeout_minutes checkpoint cpu_offload shard_over",
}.items():
    _LEFT_OUT |= {f"{_group}.{_key}" for _key in _keys.split()}
_VERBOSITY = {"verbose", "quiet", "refresh_rate", "refresh_seconds", "every_n_seconds"}
META = "meta.pt"  # of a sharded checkpoint: what every rank has alike
CHECKSUMS = "checksums.json"
CONFIG_HASH = "config_hash"  # of the run, in its checkpoints
_CHUNK_BYTES = 1 << 22
_CHECKPOINT_NAME = re.compile(r"iteration=(\d+)")
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


class CheckpointError(ValueError):
    """A checkpoint is damaged, is none, or is more than data."""


def config_hash(container: Mapping[str, Any]) -> str:
    """Return 16 hex digits that are equal for configurations that train the same thing.

    Left out are `resume`, `ckpt_path`, `paths`, `logger`, `hydra`, the number of devices and
    nodes, the name of the strategy, the size of validation batches, when checkpoints are written,
    how a judge is asked and what it may cost, and how much the callbacks say.

    Args:
        container: the configuration as plain dicts and lists. Interpolations that it holds count
            as they are written: the folder of `${paths.run}/checkpoints`, which is named after the
            time of the start, is none of it. A command's settings replace those of environment
            variables first.
    """
    text = json.dumps(_without(container, ""), sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def runs_of(
    root: Path | str, config_hash: str, pattern: str = "*", *, completed: bool = False
) -> Iterator[RunFolder]:
    """Yield the runs below `root` of this configuration that did not complete, newest first.

    Names, which begin with date and time, give the order. A run that a living process writes is
    skipped, and so is a folder whose summary cannot be read.

    Args:
        root: folder of a stage's runs, `outputs/<stage>`.
        config_hash: hash of the configuration, from `config_hash`.
        pattern: glob pattern of runs below `root`; links are left out.
        completed: yield those that did.
    """
    folders = (p for p in Path(root).glob(pattern) if p.is_dir() and not p.is_symlink())
    for path in sorted(folders, reverse=True):
        summary = summary_or_none(RunFolder(path))
        if summary is None or summary.config_hash != config_hash:
            continue
        if (summary.status == "completed") != completed:
            continue
        if not completed and is_claimed(path):
            logger.warning("passing over %s: another process is writing it", path)
        else:
            yield RunFolder(path)


def newest_complete_checkpoint(folder: RunFolder, config_hash: str | None = None) -> Path | None:
    """Return the newest checkpoint of a run that can be read, or None.

    One that cannot be read is reported, and the one before it is tried.

    Args:
        folder: folder of the run.
        config_hash: skips checkpoints that a run of another configuration wrote.
    """
    # Links lead to files that are candidates themselves.
    found = [path for path in folder.checkpoints.glob("*.ckpt") if not path.is_symlink()]
    found.sort(key=lambda path: (checkpoint_iteration(path) or 0, path.stat().st_mtime))
    for path in reversed(found):
        try:
            written_by = check_checkpoint(path).get(CONFIG_HASH)
        except CheckpointError as error:
            logger.warning("passing over a checkpoint: %s", error)
            continue
        if config_hash is None or written_by in (None, "", config_hash):
            return path
        logger.warning("passing over %s: it is of a run with another configuration", path)
    return None


def checkpoint_problem(path: Path | str) -> str | None:
    """Return why a checkpoint cannot be loaded, or None if it can."""
    try:
        check_checkpoint(Path(path))
    except CheckpointError as error:
        return str(error)
    return None


def check_checkpoint(path: Path) -> Mapping[str, Any]:
    """Return what a checkpoint holds, or the part of a folder of shards that all ranks have alike.

    Raises:
        CheckpointError: if it is damaged, is no checkpoint of a run, or is more than data.
    """
    if not path.is_dir():
        return read_checkpoint(path)
    try:
        # Written last: a folder without them was not written to its end.
        sums = json.loads((path / CHECKSUMS).read_text())
        wrong = [name for name, known in sums.items() if checksum(path / name) != known]
    except FileNotFoundError as error:
        what = f"it was not written to its end, {Path(error.filename).name} is missing"
        raise CheckpointError(f"{path}: {what}") from error
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: it is damaged ({error})") from error
    if wrong:
        raise CheckpointError(f"{path}: it is damaged in {wrong[0]}")
    return read_data(path / META)  # type: ignore[no-any-return]


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what a checkpoint file holds, its tensors mapped from the disk.

    Raises:
        CheckpointError: if it is no checkpoint of a run, or if reading it would run code.
    """
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder of shards; wanted is a file")
    content = read_data(path, mmap=True)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise CheckpointError(f"{path} has no state_dict: give one of checkpoints/ in a run folder")
    return content


def read_data(path: Path, **how: bool) -> Any:
    """Return what `torch.save` wrote, read as data on the CPU.

    Raises:
        CheckpointError: if it cannot be read, or is more than data.
    """
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, **how)
    except Exception as error:
        named = _GLOBAL.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if named is None:
            why = str(error).strip().partition("\n")[0][:200] or type(error).__name__
            raise CheckpointError(f"{path} cannot be read as a checkpoint: {why}") from error
        what = f"it names {named[1]}, which would run when it is loaded"
        raise CheckpointError(f"{path} is refused: {what}") from error


def checkpoint_iteration(path: Path | str) -> int | None:
    """Return the iteration in the name of a checkpoint, following links; None if it has none."""
    match = _CHECKPOINT_NAME.search(Path(path).resolve().name)
    return int(match.group(1)) if match else None


def checksum(path: Path) -> list[int]:
    """Return size and CRC-32 of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def _without(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): _without(item, path)
            for key, item in value.items()
            if (path := f"{name}.{key}".lstrip(".")) not in _LEFT_OUT
            and not (path.startswith("callbacks.") and key in _VERBOSITY)
        }
    if isinstance(value, list | tuple):
        return [_without(item, name) for item in value]
    return value
