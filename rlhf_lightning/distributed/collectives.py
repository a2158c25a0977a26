"""The only file that knows ranks and sharding.

Everything here also works in one process, where it does nothing. Reductions are sums or maxima
over all ranks, so that every rank takes the same decision from the same numbers.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlhf_lightning.functional.masked import zero_off_mask

BUCKET_ELEMENTS = 2**23  # of gradients exchanged at once
REPLICATE, SHARD = "replicate", "shard"
MEETING_PATIENCE = timedelta(minutes=10)  # for the first rank to start
_asked = Counter[str]()  # how often rank 0 was asked for each value


def world_size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this process's number, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def global_sum(value: Tensor) -> Tensor:
    """Return `value` summed over ranks, without a graph."""
    value = value.detach().clone()
    if world_size() > 1:
        dist.all_reduce(value, op=dist.ReduceOp.SUM)
    return value


def value_of_rank_0(what: str, make: Callable[[], str], patience: timedelta) -> str:
    """Return what rank 0's `make` returned, before there is a process group.

    The ranks were started by a launcher. They meet in the store that torchrun keeps, or in one that
    rank 0 keeps at the port after the master's, which the process group will need for itself.

    Args:
        what: its name; ranks ask for it equally often, as in each job of a sweep.
        make: called on rank 0 alone.
        patience: how long others wait for rank 0.

    Raises:
        RuntimeError: on other ranks, if rank 0 fails or is too late.
    """
    store = _meeting_store()
    store.set_timeout(patience)
    _asked[what] += 1
    key = f"{what}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_asked[what]}"
    if os.environ["RANK"] == "0":
        store.set(key, make())
    try:
        value: str = store.get(key).decode()
    except dist.DistError as error:
        why = f"rank 0 ended, or took more than {patience}: its own output says why"
        raise RuntimeError(f"no {what} from rank 0: {why}") from error
    return value


@cache
def _meeting_store() -> Any:
    kept_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]) + (not kept_by_torchrun),
        is_master=os.environ["RANK"] == "0" and not kept_by_torchrun,
        timeout=MEETING_PATIENCE,
        wait_for_workers=False,
    )


def check_same_on_all_ranks(what: str, value: str) -> None:
    """Check that every rank has the same `value`.

    Raises:
        RuntimeError: on every rank, if not; it names what each rank has.
    """
    if len(set(values := gathered(value))) > 1:
        found = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(values))
        fix = "start all of them with the same command line, from the same folder"
        raise RuntimeError(f"the ranks do not have the same {what} ({found}): {fix}")


def gathered(value: Any) -> list[Any]:
    """Return every rank's `value`, in the order of the ranks, on every rank.

    Args:
        value: a plain Python value that can be pickled.
    """
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def leave_process_group() -> None:
    """End this process's group, if it has one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def end_rank(code: int = 0) -> None:
    """End this process, if it is one of several ranks, in order: group, exit handlers, output.

    Left to the interpreter's shutdown, a process with a group of Gloo aborts now and then
    ("terminate called without an active exception"), and a launcher takes the run for failed.
    """
    if not (dist.is_available() and dist.is_initialized() and world_size() > 1):
        return
    if code != 1:  # after a failure another rank may be gone, and NCCL would wait for it
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def agreed_max(value: int, device: torch.device) -> int:
    """Return the largest `value` of all ranks: how often a phase must run on each of them."""
    if world_size() == 1:
        return value
    tensor = torch.tensor(value, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


def global_moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of `x` on `mask` over all ranks; 0 and 0 without values.

    Args:
        x: `[B, R]` values of this rank.
        mask: `[B, R]` bool, True on values that count.
    """
    count = global_sum(mask.sum()).clamp(min=1)
    mean = global_sum(zero_off_mask(x, mask).sum()) / count
    # The rounding error of the mean is taken out: equal values must whiten to exact zeros.
    mean = mean + global_sum(zero_off_mask(x - mean, mask).sum()) / count
    return mean, global_sum(zero_off_mask(x - mean, mask).square().sum()) / count


def shard(
    model: nn.Module,
    strategy: Any,
    *,
    frozen: bool,
    compute_dtype: torch.dtype | None,
    prepare: Callable[[nn.Module], None] = lambda unit: None,
) -> None:
    """Shard `model` in place with FSDP2: one unit a decoder layer or head, one for the rest.

    A module that `keeps_dtype` is gathered in the dtype of its weights, whatever others are.

    Args:
        model: has its decoder layers in one `nn.ModuleList` (all Hugging Face decoders do).
        strategy: `strategies.FSDP2Strategy`: `mesh_of_shards` may have several copies of the
            model. With `cpu_offload` the shards stay in the memory of the machine.
        frozen: reshard the root after its forward too; its backward never runs.
        compute_dtype: dtype of gathered weights and activations; None keeps the parameters'.
        prepare: called with each unit before it is sharded.
    """
    options: dict[str, Any] = {
        "mesh": strategy.mesh_of_shards,
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32),
    }
    if getattr(strategy, "cpu_offload", False):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    for layer in max(lists, key=len, default=[]):
        prepare(layer)
        fully_shard(layer, **options)
    exact = options | {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    for head in [m for m in model.modules() if getattr(m, "keeps_dtype", False)]:
        prepare(head)
        fully_shard(head, **exact)
    prepare(model)
    # A frozen root would otherwise stay gathered for ever: FSDP2 keeps a root for its backward.
    fully_shard(model, reshard_after_forward=True if frozen else None, **options)


def is_sharded(model: nn.Module) -> bool:
    """Return whether `shard` has been called with this model."""
    return isinstance(model, FSDPModule)


def mesh_in_groups(device_type: str, num_devices: int, shard_over: int) -> Any:
    """Return a mesh of all devices in groups of `shard_over` neighbours; see `shard`."""
    shape = (num_devices // shard_over, shard_over)
    return init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD))


@contextmanager
def unsharded(model: nn.Module, *, layers: bool = True) -> Iterator[nn.Module]:
    """Gather every unit of `model` once, for generation without a graph; free them at the end.

    What FSDP2 does before and after the forward of a unit is left out meanwhile: gathered weights
    need none of it, and for a single token the host would spend a third of its time there.

    Without `layers` only the root is gathered, and a layer when its forward comes: what is inside
    the root can then be called, by all ranks equally often.
    """
    units = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not units:
        yield model
        return
    root = units[0]
    # Generation calls what is inside the root. A layer whose forward comes before the root's would
    # take itself for a root, and FSDP2 has no public way to settle that beforehand.
    root._get_fsdp_state()._lazy_init()
    for unit in units if layers else [root]:
        unit.unshard()
    group = root._get_fsdp_state()._fsdp_param_group
    reshards = group is not None and group._reshard_after_forward  # a frozen root does
    if not layers:
        root.set_reshard_after_forward(False, recurse=False)
    try:
        with _without_hooks(units if layers else []):
            yield model
    finally:
        if not layers:
            root.set_reshard_after_forward(reshards, recurse=False)
        for unit in units:
            unit.reshard()


@contextmanager
def _without_hooks(units: Iterable[FSDPModule]) -> Iterator[None]:
    """Set FSDP2's own hooks aside, and put them back where they were."""
    kept: list[tuple[Any, Any]] = []
    try:
        for unit in units:
            state, module = unit._get_fsdp_state(), cast(nn.Module, unit)
            before, after = state._pre_forward_hook_handle, state._post_forward_hook_handle
            assert before is not None
            assert after is not None
            for hooks, handle in (
                (module._forward_pre_hooks, before),
                (module._forward_hooks, after),
            ):
                kept.append((hooks, hooks.copy()))
                del hooks[handle.id]
        yield
    finally:
        for hooks, all_of_them in kept:
            hooks.clear()
            hooks.update(all_of_them)


def accumulating(strategy: Any, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """Run forward and backward of a micro-batch, whose gradients DDP does not exchange.

    It expects one backward for all parameters, and several losses are taken in turn:
    `average_gradients` follows the last one. FSDP2 exchanges the gradients of every backward, or,
    with `gradient_sync="step"`, those of all micro-batches at the last one: they are whole on
    every rank until then, four bytes for each trained weight. Adapters are exchanged every time.

    Args:
        strategy: strategy of the Trainer.
        model: holds what is trained.
        last: no micro-batch of this loss follows.
    """
    if getattr(strategy, "gradient_sync", "micro_batch") == "step":
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_requires_gradient_sync(last, recurse=False)
    block: Callable[[], AbstractContextManager[Any]] = getattr(
        strategy, "block_backward_sync", nullcontext
    )
    return block()


def average_gradients(parameters: Iterable[nn.Parameter], strategy: Any) -> None:
    """Replace each gradient by its mean over ranks, where the strategy is DDP.

    FSDP2 has averaged its own, which are sharded, by now. A parameter without a gradient has none
    on any rank.
    """
    if not hasattr(strategy, "block_backward_sync") or world_size() == 1:
        return
    bucket: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
            bucket.append(parameter.grad)
            if sum(gradient.numel() for gradient in bucket) >= BUCKET_ELEMENTS:
                _average(bucket)
                bucket = []
    _average(bucket)


def _average(gradients: list[Tensor]) -> None:
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat.div_(world_size())
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their global norm is at most `max_norm`; return the norm before."""
    norm = nn.utils.clip_grad_norm_(list(parameters), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict on the CPU of rank 0, sharded tensors gathered; nothing elsewhere.

    Every rank must call it. Tensors are gathered one at a time, each on the device of its mesh:
    Lightning moves a model to the CPU after every `fit` and `validate`, and NCCL knows no CPU.
    The names of a tied parameter have one tensor, so that an export stores it once.
    """
    first = rank() == 0
    state: dict[str, Tensor] = {}
    first_name: dict[int, str] = {}  # by parameter
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        known = first_name.setdefault(id(value), name)
        if known != name:
            if first:
                state[name] = state[known]
            continue
        value = whole(value.detach())
        if first:
            state[name] = value.cpu()
    return state


def whole(value: Tensor) -> Tensor:
    """Return a tensor of which each rank may hold a part; every rank must call it."""
    return _on_device_of_mesh(value).full_tensor() if isinstance(value, DTensor) else value


def _on_device_of_mesh(value: DTensor) -> DTensor:
    mesh = value.device_mesh
    return DTensor.from_local(
        value.to_local().to(mesh.device_type),
        mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
