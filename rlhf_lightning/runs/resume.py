"""The run to continue and its newest complete checkpoint."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import is_claimed
from rlhf_lightning.runs.reading import read_json
from rlhf_lightning.runs.summary import read_summary

logger = logging.getLogger(__name__)

# What does not change what is learnt: a run continues with another value of these.
_LEFT_OUT = frozenset(
    {
        "resume",
        "ckpt_path",
        "export",
        "paths",
        "logger",
        "hydra",
        "trainer.devices",
        "trainer.num_nodes",
        "trainer.enable_progress_bar",
        "trainer.enable_model_summary",
        "trainer.default_root_dir",
        "data.validation_batch_size",
        "callbacks.checkpoint.every_n_iterations",
        "callbacks.checkpoint.every_minutes",
        "callbacks.checkpoint.must_save_by",
        "callbacks.checkpoint.keep_last",
        "judge.api_key_env",
        "judge.concurrency",
        "judge.input_price",
        "judge.max_completion_tokens",
        "judge.max_cost",
        "judge.max_retries",
        "judge.max_tokens",
        "judge.output_price",
        "judge.requests_per_minute",
        "judge.timeout",
        "strategy.name",
        "strategy.timeout_minutes",
        "strategy.checkpoint",
        "strategy.cpu_offload",
        "strategy.shard_over",
    }
)
_VERBOSITY = frozenset({"verbose", "quiet", "refresh_rate", "refresh_seconds", "every_n_seconds"})
META = "meta.pt"  # of a sharded checkpoint: what every rank has alike
CHECKSUMS = "checksums.json"
CONFIG_HASH = "config_hash"  # of the run, in its checkpoints
_CHUNK_BYTES = 1 << 22
_CHECKPOINT_NAME = re.compile(r"iteration=(\d+)")


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


def unfinished_runs(
    root: Path | str, config_hash: str, *, pattern: str = "*"
) -> Iterator[RunFolder]:
    """Yield the runs below `root` of this configuration that did not complete, newest first.

    Names, which begin with date and time, give the order. A run that a living process writes is
    skipped, and so is a folder whose summary cannot be read.

    Args:
        root: folder of a stage's runs, `outputs/<stage>`.
        config_hash: hash of the configuration, from `config_hash`.
        pattern: glob pattern of runs below `root`; links are left out.
    """
    folders = (p for p in Path(root).glob(pattern) if p.is_dir() and not p.is_symlink())
    for path in sorted(folders, reverse=True):
        folder = RunFolder(path)
        try:
            summary = read_summary(folder)
        except (FileNotFoundError, ValueError):
            continue
        if summary.config_hash == config_hash and summary.status != "completed":
            if not is_claimed(path):
                if summary.status == "running":
                    logger.warning(
                        "%s never ended: its process was killed, or something that it calls ended "
                        "it without a word (os._exit)",
                        path,
                    )
                yield folder
            else:
                logger.warning("passing over %s: another process is writing it", path)


def newest_complete_checkpoint(folder: RunFolder, config_hash: str | None = None) -> Path | None:
    """Return the newest checkpoint of a run that can be read to its end, or None.

    A damaged one is reported and the one before it is tried. Every byte of a candidate is read once
    and compared with its checksum, which costs less than finding out later.

    Args:
        folder: folder of the run.
        config_hash: skips checkpoints that a run of another configuration wrote.
    """
    return newest_complete_in(folder.checkpoints, config_hash)


def newest_complete_in(checkpoints: Path, config_hash: str | None = None) -> Path | None:
    """Return that checkpoint of a folder of checkpoints."""
    for path in _candidates(checkpoints):
        problem = checkpoint_problem(path)
        if problem is None and config_hash is not None and _hash_in(path) not in ("", config_hash):
            problem = "it is of a run with another configuration"
        if problem:
            logger.warning("passing over the checkpoint %s: %s", path, problem)
        else:
            return path
    return None


def _hash_in(path: Path) -> str:
    """Return the hash of the configuration in a checkpoint; "" where there is none to be read."""
    try:
        content = read_data(path / META) if path.is_dir() else read_data(path, mmap=True)
    except CheckpointError:
        return ""  # loading it raises the error
    return str(content.get(CONFIG_HASH, "")) if isinstance(content, Mapping) else ""


def checkpoint_problem(path: Path | str) -> str | None:
    """Return why a checkpoint cannot be loaded, or None if it can.

    A checkpoint is a zip archive of `torch.save`, or a folder of shards with their checksums.
    """
    path = Path(path)
    if path.is_dir():
        return _folder_problem(path)
    if not path.is_file():
        return "it does not exist"
    try:
        if not zipfile.is_zipfile(path):
            return f"it was cut short or is no checkpoint ({path.stat().st_size} bytes)"
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
            pickled = any(name.endswith("data.pkl") for name in archive.namelist())
    # Of damaged names, sizes and flags zipfile makes errors of half a dozen kinds.
    except Exception as error:
        return f"it is damaged ({' '.join(str(error).split()) or type(error).__name__})"
    if broken is not None:
        return f"it is damaged in {_escaped(broken)}"
    return None if pickled else "it is an archive, but no checkpoint of torch.save"


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


def _folder_problem(folder: Path) -> str | None:
    # The checksums are written last, so a folder without them was not written to its end.
    try:
        expected = read_json(folder / CHECKSUMS)
        if META not in expected:
            return f"it was not written to its end, {META} is missing"
        for name, sums in expected.items():
            shard = folder / Path(name).name
            if (shard.exists() and not shard.is_file()) or checksum(shard) != sums:
                return f"it is damaged in {_escaped(name)}"
        for shard in sorted(folder.glob("*.safetensors")):
            if shard.name not in expected:
                return f"{CHECKSUMS} does not list {_escaped(shard.name)}, which is of another save"
    except FileNotFoundError as error:
        missing = _escaped(Path(error.filename).name)
        return f"it was not written to its end, {missing} is missing"
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"it is damaged ({_escaped(str(error))})"
    return None


def _escaped(text: str) -> str:
    return text.encode("unicode_escape").decode()


def _candidates(checkpoints: Path) -> list[Path]:
    if not checkpoints.is_dir():
        return []
    # Links lead to files that are candidates themselves.
    found = [p for p in checkpoints.glob("*.ckpt") if not p.is_symlink()]

    def age(path: Path) -> tuple[int, float]:
        iteration = checkpoint_iteration(path)
        return (-1 if iteration is None else iteration, path.stat().st_mtime)

    return sorted(found, key=age, reverse=True)


def _without(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        items = [(key, f"{name}.{key}" if name else str(key), item) for key, item in value.items()]
        return {
            str(key): _without(item, path)
            for key, path, item in items
            if path not in _LEFT_OUT and not (path.startswith("callbacks.") and key in _VERBOSITY)
        }
    if isinstance(value, list | tuple):
        return [_without(item, name) for item in value]
    return value


_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


class CheckpointError(ValueError):
    """A checkpoint is damaged, is none, or is more than data."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what a checkpoint file holds, its tensors mapped from the disk.

    Raises:
        CheckpointError: if it is no checkpoint of a run, or if reading it would run code.
    """
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder of shards; wanted is a file")
    content = read_data(path, mmap=True)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise CheckpointError(
            f"{path} is a file of torch.save, but no checkpoint of a run (it has no state_dict): "
            "give one of checkpoints/ in a run folder"
        )
    return content


def check_checkpoint(path: Path) -> Mapping[str, Any]:
    """Return what a checkpoint holds, once it can be loaded and loading it runs no code.

    The shards of a folder are safetensors files, which hold numbers only; the rest is returned.

    Args:
        path: checkpoint file, or folder of shards.

    Raises:
        CheckpointError: if it is damaged, is no checkpoint of a run, or is more than data.
    """
    if problem := checkpoint_problem(path):
        raise CheckpointError(f"{path}: {problem}")
    content = read_data(path / META) if path.is_dir() else read_checkpoint(path)
    return content if isinstance(content, Mapping) else {}


def read_data(path: Path, **how: bool) -> Any:
    """Return what `torch.save` wrote, read as data on the CPU.

    Raises:
        CheckpointError: if it cannot be read, or is more than data.
    """
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, **how)
    except pickle.UnpicklingError as error:
        raise CheckpointError(_refusal(path, str(error))) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        problem = checkpoint_problem(path) or _first_line(error)
        raise CheckpointError(f"{path} cannot be read: {problem}") from error


def _refusal(path: Path, text: str) -> str:
    found = _GLOBAL.search(text)
    named = found.group(1) if found else "code"
    return (
        f"{path} is refused: it names {named}, which would run when it is loaded, and a "
        "checkpoint holds tensors and plain values only. Take one that you or this package wrote"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
