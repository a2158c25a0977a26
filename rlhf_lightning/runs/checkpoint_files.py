"""Checkpoints are data: read without running anything that they name."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_lightning.runs.resume import checkpoint_problem

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
# What the index of a folder of `torch.distributed.checkpoint` is made of.
_INDEX = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}


class CheckpointError(ValueError):
    """A checkpoint is damaged, is none, or is more than data."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what a checkpoint file holds, its tensors mapped from the disk.

    Raises:
        CheckpointError: if it is no checkpoint of a run, or if reading it would run code.
    """
    import torch

    if path.is_dir():
        raise CheckpointError(f"{path} is a distributed checkpoint in a folder; wanted is a file")
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

    torch reads the index and the plain values of a distributed checkpoint (a folder) as pickles
    that may name any function; here they are read as what they have to be.

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

    part = path / "meta.pt"
    try:
        torch.load(part, map_location="cpu", weights_only=True)
        part = path / ".metadata"
        with part.open("rb") as file:
            index = _IndexUnpickler(file).load()
        for value in _plain_values(path, index):
            part = value.file
            torch.load(io.BytesIO(value.content), weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(_refusal(part, str(error))) from error
    except (
        *(RuntimeError, OSError, EOFError, ValueError, zipfile.BadZipFile),
        *(AttributeError, KeyError, TypeError, IndexError, ImportError),
    ) as error:
        raise CheckpointError(f"{path}: {part.name} is damaged ({_first_line(error)})") from error


class _IndexUnpickler(pickle.Unpickler):
    """Builds the index of a distributed checkpoint and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and name not in _INDEX.get(module, ()):
            raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {module}.{name}")
        return super().find_class(module, name)


class _PlainValue(NamedTuple):
    file: Path
    content: bytes


def _plain_values(path: Path, index: Any) -> Iterator[_PlainValue]:
    """Yield everything in a distributed checkpoint that is no tensor."""
    for key, where in index.storage_data.items():
        kind = type(index.state_dict_metadata[key.fqn]).__name__
        if kind == "BytesStorageMetadata":
            part = path / Path(where.relative_path).name
            with part.open("rb") as file:
                file.seek(where.offset)
                yield _PlainValue(part, file.read(where.length))


def _refusal(path: Path, text: str) -> str:
    found = _GLOBAL.search(text)
    named = found.group(1) if found else "code"
    return (
        f"{path} is refused: it names {named}, which would run when it is loaded, and a "
        "checkpoint holds tensors and plain values only. Take one that you or this package wrote"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
