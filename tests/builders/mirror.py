"""A second device on a machine that has none: `mirror:0`, PyTorch's PrivateUse1 in Python alone.

A tensor on it holds a CPU tensor with the real numbers, so that whole training steps run and can be
compared with the CPU's to the bit. What a GPU refuses raises here too: tensors of two devices in
one operation, `.numpy()`. What a GPU makes the host wait for is counted, with the line of this
project that asked for it: reads (`.item()`, `.tolist()`, `nonzero`, boolean indices, copies to the
host) and copies to the device that are not `non_blocking`, which CUDA follows with a
synchronization of the stream.

Registering a device changes the process for good, so that `on_mirror` calls a function in a
process of its own.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.builders.processes import SERVER

T = TypeVar("T")
NAME = "mirror"
ROOT = Path(__file__).resolve().parents[2]
OURS = (f"{ROOT}/rlhf_lightning/", f"{ROOT}/tests/")
READ, WRITE = "read", "write"

COPIES = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"}
INDEXED = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
# CUDA has to know how large their result is, or gives a number to Python.
READS = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::unique_dim",
}


class Log:
    """Kernels that were launched, and waits by kind and line, since `recorded` began."""

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[tuple[str, str]] = Counter()

    def count(self, *parts: str, kind: str | None = None) -> int:
        """Return the waits of `kind` at lines that hold one of `parts`; without any, all waits."""
        return sum(
            number
            for (own, place), number in self.waits.items()
            if kind in (None, own) and (not parts or any(part in place for part in parts))
        )

    def lines(self) -> list[str]:
        """Return a line for each place that waits, the most frequent first."""
        return [f"{n:6} {kind} {place}" for (kind, place), n in self.waits.most_common()]


_logs: list[Log] = []


@contextmanager
def recorded() -> Iterator[Log]:
    """Count what happens on the device; inner counts are part of outer ones."""
    _logs.append(log := Log())
    try:
        yield log
    finally:
        _logs.remove(log)


def _wait(kind: str, name: str) -> None:
    place = f"{name} {_caller()}"
    for log in _logs:
        log.waits[kind, place] += 1


def _caller() -> str:
    """Return the innermost line of this project, and below it that of the library it called."""
    frame, library = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OURS) and name != __file__:
            return f"{name.removeprefix(f'{ROOT}/')}:{frame.f_lineno}{library}"
        if not library and ("/transformers/" in name or "/lightning/" in name):
            library = f" > {name.rpartition('site-packages/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return f"?{library}"


class MirrorTensor(torch.Tensor):
    """A tensor on the device; `raw` holds its numbers."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: Tensor) -> MirrorTensor:
        """Wrap `raw`, whose storage it shares."""
        made: MirrorTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device(NAME, 0),
        )
        made.raw = raw.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the numbers."""
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        """Return Python numbers, which the host waits for."""
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse, as for every tensor of a device."""
        raise TypeError("can't convert mirror:0 device type tensor to numpy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the numbers: checkpoints are read where there is no such device."""
        return self.raw.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return the numbers."""
        return f"MirrorTensor({self.raw})"


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    flat, spec = tree_flatten((args, kwargs))
    # In inference mode composite operations arrive whole, with the device among the arguments.
    devices = [x for x in flat if isinstance(x, torch.device)]
    if isinstance(kwargs.get("device"), str | int):
        devices.append(torch.device(kwargs["device"]))
    asked = devices[-1].type if devices else None
    mirrored = any(isinstance(x, MirrorTensor) for x in flat)
    if not mirrored and asked != NAME:
        return func(*args, **kwargs)
    name = func._schema.name
    to_host = mirrored and (
        asked not in (None, NAME) or (name == "aten::copy_" and not _is_mirror(args[0]))
    )
    _check_devices(func, name, flat, args, mirrored=mirrored)
    _count(func, name, flat, args, kwargs, to_host=to_host)
    plain = [_plain(x) for x in flat]
    own, named = tree_unflatten(plain, spec)
    if named.get("device") is not None:
        named["device"] = torch.device("cpu")
    named.pop("pin_memory", None)
    drawn = torch.Tag.nondeterministic_seeded in func.tags
    with _drawing_there() if drawn else nullcontext():
        out = func(*own, **named)
    if name == "aten::_to_copy" and _same_storage(out, own[0]):
        out = out.clone()  # a copy to another device never shares memory
    if to_host:
        return args[0] if name == "aten::copy_" else out
    wrapped = tree_map(lambda x: MirrorTensor(x) if isinstance(x, Tensor) else x, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if mirrored else wrapped


@contextmanager
def _drawing_there() -> Iterator[None]:
    """Draw from the generator of the device, which gives other numbers than the CPU's."""
    before = torch.get_rng_state()
    torch.set_rng_state(_Backend.state)
    try:
        yield
    finally:
        _Backend.state = torch.get_rng_state()
        torch.set_rng_state(before)


def _plain(x: Any) -> Any:
    if isinstance(x, MirrorTensor):
        return x.raw
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == NAME else x


def _is_mirror(x: Any) -> bool:
    return isinstance(x, MirrorTensor)


def _same_storage(out: Any, other: Any) -> bool:
    return (
        isinstance(out, Tensor) and out.untyped_storage()._cdata == other.untyped_storage()._cdata  # type: ignore[attr-defined]
    )


def _check_devices(func: Any, name: str, flat: list[Any], args: Any, *, mirrored: bool) -> None:
    """Raise if an operation mixes devices; numbers and indices may be on the host."""
    if not mirrored or name in COPIES:
        return
    strange = [x for x in flat if isinstance(x, Tensor) and not _is_mirror(x) and x.ndim > 0]
    if name in INDEXED and _is_mirror(args[0]):
        for index in args[1]:
            if isinstance(index, Tensor) and not _is_mirror(index):
                _wait(WRITE, f"{name} by a tensor of the host")
        strange = [x for x in strange if len(args) > 2 and x is args[2]]
    if strange:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} got mirror:0 and cpu "
            f"{[tuple(x.shape) for x in strange]}"
        )


def _count(func: Any, name: str, flat: list[Any], args: Any, kwargs: Any, *, to_host: bool) -> None:
    non_blocking = kwargs.get("non_blocking", len(args) > 2 and name == "aten::copy_" and args[2])
    uploads = name in COPIES and not to_host and any(
        isinstance(x, Tensor) and not _is_mirror(x) for x in flat
    )  # fmt: skip
    by_mask = name in INDEXED and any(
        _is_mirror(i) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
    )
    by_repeats = name == "aten::repeat_interleave" and func._overloadname == "Tensor"
    if to_host or name in READS or by_mask or (by_repeats and not kwargs.get("output_size")):
        _wait(READ, name)
    elif uploads and not non_blocking:
        _wait(WRITE, name)
    if not func.is_view:
        for log in _logs:
            log.kernels[name] += 1


class MirrorMode(TorchDispatchMode):
    """The context in which functions that make tensors know the device."""

    def __enter__(self) -> Any:
        """Let a module that is moved keep its parameters, and so its ties, as to and from a GPU."""
        torch.__future__.set_swap_module_params_on_conversion(True)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) copies in sight
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Go back."""
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_swap_module_params_on_conversion(False)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation that makes a tensor."""
        return _run(func, args, kwargs or {})


class _Backend:
    """`torch.mirror`."""

    state = torch.Generator().manual_seed(1).get_state()  # of its random numbers
    _is_in_bad_fork = staticmethod(lambda: False)
    _lazy_init = staticmethod(lambda: None)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    set_device = staticmethod(lambda device: None)
    synchronize = staticmethod(lambda device=None: None)

    @classmethod
    def get_rng_state(cls, device: Any = None) -> Tensor:
        return cls.state.clone()

    @classmethod
    def set_rng_state(cls, state: Tensor, device: Any = None) -> None:
        cls.state = state.clone()

    @classmethod
    def manual_seed(cls, seed: int) -> None:
        cls.state = torch.Generator().manual_seed(seed + 1).get_state()

    manual_seed_all = manual_seed


def register() -> None:
    """Make the device known to this process, for good."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Backend)


class MirrorAccelerator(Accelerator):
    """The device as Lightning takes it."""

    def setup_device(self, device: torch.device) -> None: ...
    def teardown(self) -> None: ...
    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(NAME, 0)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME


def trainer_options(device: str) -> dict[str, Any]:
    """Return the arguments of a Trainer that runs on `device`: `cpu`, `cuda` or `mirror`."""
    if device != NAME:
        return {"accelerator": device, "devices": 1}
    strategy = SingleDeviceStrategy(torch.device(NAME, 0))
    # In inference mode composite operations would arrive whole, and hide what they wait for.
    return {"accelerator": MirrorAccelerator(), "strategy": strategy, "inference_mode": False}


def on_mirror(function: Callable[..., T], *args: Any, timeout: float = 100, **kwargs: Any) -> T:
    """Return `function(*args)` of a process in which the device is known.

    Args:
        function: of a module, found again by its name; its result is pickled, tensors of the device
            as the CPU's.
        args: pickled too.
        timeout: seconds.
        kwargs: likewise.

    Raises:
        RuntimeError: with the traceback of what it raised.
    """
    ours, theirs = SERVER.Pipe()
    process = SERVER.Process(target=_call, args=(theirs, function, args, kwargs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise TimeoutError(f"{function.__name__} took more than {timeout} seconds")
        result, error = pickle.loads(ours.recv_bytes())
    finally:
        process.kill()
        process.join()
    if error is not None:
        raise RuntimeError(error)
    return result  # type: ignore[no-any-return]


def _call(pipe: Connection, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Threads of transformers would make tensors of a device that this thread alone knows.
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    result, error = None, None
    try:
        register()
        with MirrorMode():
            result = function(*args, **kwargs)
    except BaseException:
        error = traceback.format_exc()
    pipe.send_bytes(pickle.dumps((result, error)))
