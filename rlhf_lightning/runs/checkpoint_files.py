"""Checkpoints are data: read without running anything that they name."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

from rlhf_lightning.runs.resume import META, checkpoint_problem

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


class CheckpointError(ValueError):
    """A checkpoint is damaged, is none, or is more than data."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what a checkpoint file holds, its tensors mapped from the disk.

    Raises:
        CheckpointError: if it is no checkpoint of a run, or if reading it would run code.
    """
    import torch

    if path.is_dir():
        raise CheckpointError(f"{path} is a folder of shards; wanted is a file")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(_refusal(path, str(error))) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        if problem := checkpoint_problem(path):
            raise CheckpointError(f"{path}: {problem}") from error
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise CheckpointError(
            f"{path} is a file of torch.save, but no checkpoint of a run (it has no state_dict): "
            "give one of checkpoints/ in a run folder"
        )
    return content


def check_checkpoint(path: Path) -> None:
    """Check that a checkpoint can be loaded, and that loading it runs no code.

    The shards of a folder are safetensors files, which hold numbers only.

    Args:
        path: file or folder.

    Raises:
        CheckpointError: if it is damaged, is no checkpoint of a run, or is more than data.
    """
    if problem := checkpoint_problem(path):
        raise CheckpointError(f"{path}: {problem}")
    if not path.is_dir():
        read_checkpoint(path)
        return
    import torch

    try:
        torch.load(path / META, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(_refusal(path / META, str(error))) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path}: {META} is damaged ({_first_line(error)})") from error


def _refusal(path: Path, text: str) -> str:
    found = _GLOBAL.search(text)
    named = found.group(1) if found else "code"
    return (
        f"{path} is refused: it names {named}, which would run when it is loaded, and a "
        "checkpoint holds tensors and plain values only. Take one that you or this package wrote"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
