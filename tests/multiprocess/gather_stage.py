"""One rank that gathers a model which was moved to the CPU: `gather_stage.py OUT`.

As on GPUs, the model is sharded over a mesh of another device than the CPU, whose process group
knows that device alone. The device is in Python; its tensors have numbers, which gloo exchanges.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from rlhf_lightning.distributed.collectives import full_state

DEVICE = "elsewhere"
FULL = torch.arange(12.0).reshape(6, 2)


class Elsewhere(Tensor):
    """A tensor on the device, which holds its numbers in `host`."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), dtype=host.dtype, device=torch.device(DEVICE)
        )
        made.host = host.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class DeviceMode(TorchDispatchMode):
    """Runs what concerns the device, and refuses collectives of the CPU's tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    here = any(isinstance(a, Elsewhere) for a in args)
    collective = func._schema.name.startswith("_c10d_functional::all")
    if collective and not here:
        raise RuntimeError("No backend type associated with device type cpu")
    device = kwargs.get("device")
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    leaves = here if device is None else torch.device(device).type == DEVICE
    out = func(*tree_map(lambda a: a.host if isinstance(a, Elsewhere) else a, args), **kwargs)
    return tree_map(lambda t: Elsewhere(t) if isinstance(t, Tensor) else t, out) if leaves else out


def main(out: Path) -> None:
    module = SimpleNamespace(
        _is_in_bad_fork=lambda: False,
        current_device=lambda: 0,
        device_count=lambda: 1,
        is_available=lambda: True,
        is_initialized=lambda: True,
        set_device=lambda device: None,
    )
    _setup_privateuseone_for_python_backend(rename=DEVICE, backend_module=module)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with DeviceMode():
        mesh = DeviceMesh(DEVICE, [0, 1])
        model = nn.Linear(2, 6, bias=True)
        share = FULL.chunk(2)[rank].to(DEVICE)
        model.weight = nn.Parameter(DTensor.from_local(share, mesh, [Shard(0)], run_check=False))
        for name in ("weight", "bias"):  # what Lightning's teardown leaves
            moved = getattr(model, name).detach().cpu()
            setattr(model, name, nn.Parameter(moved))
        model.tied = model.weight
        assert not isinstance(model.weight.to_local(), Elsewhere)
        state = full_state(model)
    torch.save(state, out / f"rank_{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)
