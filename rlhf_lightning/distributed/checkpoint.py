"""A checkpoint to which each rank writes its own share: a folder of safetensors files.

The tensors that ranks share are written and read by `torch.distributed.checkpoint`, in its
safetensors format: its own format has a pickle for an index, and reading one can run code. What
every rank has alike (counters, steps, settings of the optimizer) is in `meta.pt`.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from rlhf_lightning.runs.atomic import remove, sync_folder, write_text
from rlhf_lightning.runs.resume import CHECKSUMS, META, checksum, read_data

_MODEL = "state_dict"
_OPTIMIZERS = "optimizer_states"
_ALIKE = "alike"  # tensors that are no DTensors
# A file is serialized in memory before it is written: this bounds what that takes.
_FILE_BYTES = 2**30


def save_shards(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint of sharded tensors to the folder `path` in one step; all ranks call it.

    Each rank writes its share into a folder beside `path`, which takes its name when all of it is
    on disk and has been read back.

    Args:
        checkpoint: Lightning's checkpoint; `state_dict` and `optimizer_states` hold DTensors by
            name.
        path: folder of the checkpoint.

    Raises:
        OSError: if there is no room, or what was written cannot be read back; `path` is unchanged.
    """
    staging = path.with_name(f".{path.name}.tmp-sharded")
    first = dist.get_rank() == 0
    if first:
        remove(staging)
        staging.mkdir(parents=True)
    dist.barrier()
    shared, alike = _split(checkpoint)
    rest = {k: v for k, v in checkpoint.items() if k not in (_MODEL, _OPTIMIZERS)} | {_ALIKE: alike}
    try:
        _write_shared(shared, staging)
        sums: list[Any] = [None] * dist.get_world_size()
        own = sorted(staging.glob(f"shard-{dist.get_rank() + 1:05d}-*"))
        dist.all_gather_object(sums, {file.name: checksum(file) for file in own})
        outcome: list[Exception | None] = [None]
        if first:
            try:
                _complete(staging, path, rest, sums, set(shared))
            except (OSError, RuntimeError) as error:  # torch.save raises the latter
                outcome = [error]
        dist.broadcast_object_list(outcome)
        if outcome[0] is not None:
            raise outcome[0]
    finally:
        if first:
            remove(staging)


def load_shards(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Any:
    """Load a folder of `save_shards` into a sharded model and its optimizers; all ranks call it.

    The number of ranks may be another one than wrote it.

    Returns:
        The rest of the checkpoint.

    Raises:
        ValueError: if it holds other tensors than the model and the optimizers have.
    """
    rest = read_data(path / META)
    alike = rest.pop(_ALIKE)
    own: dict[str, Any] = {
        _MODEL: get_model_state_dict(model),
        _OPTIMIZERS: [get_optimizer_state_dict(model, optimizer) for optimizer in optimizers],
    }
    shared, _ = _split(own)
    reader = _reader(path)
    stored = set(reader.read_metadata().state_dict_metadata)
    # A parameter that has not been trained yet, as in a warm-up of the value model, has no state.
    untouched = {name for name in set(shared) - stored if not name.startswith(f"{_MODEL}/")}
    if differing := sorted(stored ^ set(shared) - untouched):
        raise ValueError(
            f"{path} holds the tensors of another model: {differing[0]} is in one only"
        )
    shared = {name: tensor for name, tensor in shared.items() if name in stored}
    with _cause_of_failure():
        dcp.load(shared, storage_reader=reader)
    set_model_state_dict(model, {**own[_MODEL], **alike[_MODEL]})
    for index, optimizer in enumerate(optimizers):
        groups = alike[_OPTIMIZERS][index]["param_groups"]
        state = {
            name: values | _under(shared, f"{index}/{name}/")
            for name, values in alike[_OPTIMIZERS][index]["state"].items()
        }
        set_optimizer_state_dict(
            model,
            optimizer,
            {"state": state, "param_groups": groups},
            options=StateDictOptions(strict=False),
        )
    return rest


def load_whole(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Any:
    """Load a checkpoint of one file into a sharded model and its optimizers; all ranks call it.

    Lightning's own way wants a state of every parameter, and gives one that had none the state of
    a step that never was.

    Returns:
        The rest of the checkpoint.
    """
    rest: dict[str, Any] = read_data(path, mmap=True)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, rest.pop(_MODEL), options=options)
    for optimizer, saved in zip(optimizers, rest.pop(_OPTIMIZERS, ()), strict=True):
        owners = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = [n for group in saved["param_groups"] for n in group["params"]]
        state = {
            n: {name: _share(value, p) for name, value in saved["state"][n].items()}
            for n, p in zip(numbers, owners, strict=True)
            if n in saved["state"]
        }
        optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
    return rest


def _under(tensors: Mapping[str, DTensor], prefix: str) -> dict[str, DTensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _share(value: Any, parameter: nn.Parameter) -> Any:
    """Return this rank's share of a value that a parameter's optimizer keeps for each element."""
    if not isinstance(parameter, DTensor) or getattr(value, "shape", None) != parameter.shape:
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def read_full(path: Path) -> dict[str, Any]:
    """Return the checkpoint in a folder of `save_shards` as one of a single process, on the CPU."""
    rest: dict[str, Any] = read_data(path / META)
    alike = rest.pop(_ALIKE)
    reader = _reader(path)
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    shared = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in stored.items()}
    with warnings.catch_warnings(), _cause_of_failure():
        warnings.filterwarnings("ignore", message=".*intent is to load in a single process.*")
        dcp.load(shared, storage_reader=reader, no_dist=True)
    rest[_MODEL] = dict(alike[_MODEL])
    optimizers = alike[_OPTIMIZERS]
    for key, tensor in shared.items():
        owner, _, name = key.partition("/")  # names of adapters have slashes, too
        if owner == _MODEL:
            rest[_MODEL][name] = tensor
        else:
            name, _, value = name.rpartition("/")
            optimizers[int(owner)]["state"].setdefault(name, {})[value] = tensor
    rest[_OPTIMIZERS] = [_by_number(optimizer) for optimizer in optimizers]
    return rest


def _reader(path: Path) -> HuggingFaceStorageReader:
    """Return a reader of the shards that the checksums list, whatever else a copy left there."""
    reader = HuggingFaceStorageReader(str(path))
    listed = [str(path / Path(name).name) for name in json.loads((path / CHECKSUMS).read_text())]
    reader.fs.ls = lambda path: listed  # type: ignore[method-assign]
    return reader


def _split(checkpoint: Mapping[str, Any]) -> tuple[dict[str, DTensor], dict[str, Any]]:
    """Return the DTensors by a name for each, and everything else in the shape it has."""
    shared: dict[str, DTensor] = {}
    alike: dict[str, Any] = {_MODEL: {}, _OPTIMIZERS: []}
    for name, value in checkpoint[_MODEL].items():
        if isinstance(value, DTensor):
            shared[f"{_MODEL}/{name}"] = value
        else:
            alike[_MODEL][name] = value
    for index, optimizer in enumerate(checkpoint.get(_OPTIMIZERS, ())):
        state: dict[str, dict[str, Any]] = {}
        for name, values in optimizer["state"].items():
            state[name] = {k: v for k, v in values.items() if not isinstance(v, DTensor)}
            shared |= {f"{index}/{name}/{k}": v for k, v in values.items() if k not in state[name]}
        alike[_OPTIMIZERS].append({"state": state, "param_groups": optimizer["param_groups"]})
    return shared, alike


def _write_shared(shared: Mapping[str, DTensor], folder: Path) -> None:
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=dict(_files(shared)), save_distributed=True
    )
    with _cause_of_failure():
        dcp.save(dict(shared), storage_writer=writer)


@contextmanager
def _cause_of_failure() -> Iterator[None]:
    """Raise, on every rank, the cause that torch wraps in an error that is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise cause from None


def _files(shared: Mapping[str, DTensor]) -> Iterator[tuple[str, int]]:
    """Yield for each tensor the number of its file on each rank, from 1."""
    number, size = 1, 0
    for name, tensor in shared.items():
        share = tensor.to_local()
        size += share.numel() * share.element_size()
        if size > _FILE_BYTES:
            number, size = number + 1, 0
        yield name, number


def _complete(
    staging: Path,
    path: Path,
    rest: dict[str, Any],
    sums: list[dict[str, list[int]]],
    names: set[str],
) -> None:
    """Add what is alike and the checksums, check that all is there, and give it its name."""
    with (staging / META).open("wb") as file:
        torch.save(rest, file)
        file.flush()
        os.fsync(file.fileno())
    every = {META: checksum(staging / META)}
    for of_rank in sums:
        every |= of_rank
    write_text(staging / CHECKSUMS, json.dumps(every, indent=1))
    _check(staging, names, path)
    remove(path)
    staging.rename(path)
    sync_folder(path.parent)


def _check(staging: Path, written: set[str], path: Path) -> None:
    """Check that the files are there, and hold what they should; their bytes were just read."""
    listed = set(json.loads((staging / CHECKSUMS).read_text())) | {CHECKSUMS}
    there = {file.name for file in staging.iterdir()}
    stored = set(HuggingFaceStorageReader(str(staging)).read_metadata().state_dict_metadata)
    if listed != there or stored != written:
        lost = f"{sorted(listed ^ there)} of its files and {len(stored ^ written)} of its tensors"
        raise OSError(f"the checkpoint {path} cannot be read back: {lost} are missing")


def _by_number(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer as a process without sharding has it: by numbers."""
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    groups = [
        {**group, "params": [number[name] for name in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    return {"state": {number[k]: v for k, v in optimizer["state"].items()}, "param_groups": groups}
