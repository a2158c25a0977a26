"""Fake CUDA tensors on a machine without CUDA: the code of a GPU runs, and no kernel does.

Shapes, dtypes, device checks and autograd are real. Numbers are not: reading one raises. A process
imports this module before torch, which looks for a device once, at its own import.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch


def _load_stub() -> None:
    """Compile and load what autograd asks of CUDA; needs `g++`.

    Raises:
        RuntimeError: if torch is imported already, or has CUDA: its own would be replaced.
    """
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_folder = Path(spec.origin).parent
    if "torch" in sys.modules or (torch_folder / "lib" / "libtorch_cuda.so").exists():
        raise RuntimeError(
            "fake CUDA tensors need a CPU build of torch (make install) and a process of their own"
        )
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "fake_cuda.so"
        include = torch_folder / "include"
        folders = [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
        options = ["-O1", "-std=c++20", "-shared", "-fPIC", *folders]
        source = str(Path(__file__).with_suffix(".cpp"))
        subprocess.run(["g++", *options, source, "-o", str(built)], check=True)
        libraries = [torch_folder / "lib" / f"lib{name}.so" for name in ("c10", "torch_cpu")]
        for library in (*libraries, built):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


_load_stub()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402
from transformers import masking_utils  # noqa: E402

DEVICE = torch.device("cuda", 0)
LIBRARY = torch.library.Library("fake_cuda", "DEF")


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Let tensors on `DEVICE` be made and computed with inside."""
    with (
        patch("torch.amp.autocast_mode.torch.cuda.amp.common.amp_definitely_not_available", bool),
        patch("torch.cuda.is_bf16_supported", lambda *_: True),
        # It reads numbers, to see that no row holds two texts.
        patch.object(masking_utils, "find_packed_sequence_indices", lambda *_: None),
        # So does this: the head of random weights is what it should be.
        patch("rlhf_lightning.models.heads.check_head_split", lambda _: None),
        patch("torch.nn.functional.scaled_dot_product_attention", _attention),
        # A build for the CPU lacks the kernel, and would take it apart.
        patch("torch.nn.functional.rms_norm", _rms_norm),
        FakeTensorMode(),
    ):
        yield


@contextmanager
def autocast(dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Open CUDA's autocast, which `torch.autocast` refuses where there is no CUDA."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_cache_enabled(False)  # as Lightning does
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.set_autocast_cache_enabled(cached)
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


# -- attention as one kernel: flash without a mask, memory-efficient with one; and norms ----------


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **_: Any
) -> Tensor:
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if attn_mask is None:
        return _Flash.apply(q, k, v)  # type: ignore[no-any-return, no-untyped-call]
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(q.dtype)
    return torch.ops.fake_cuda.masked(q, k, v, attn_mask)  # type: ignore[no-any-return]


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.ops.fake_cuda.flash(q, k, v)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.ops.fake_cuda.flash_backward(*grads, *ctx.saved_tensors)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None, epsilon: float) -> Tensor:
    return _RMSNorm.apply(x, x.new_ones(shape) if weight is None else weight)  # type: ignore[no-any-return, no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        normed, rstd = torch.ops.fake_cuda.rms_norm(x, weight)
        ctx.save_for_backward(x, weight, rstd)
        return normed  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.ops.fake_cuda.rms_norm_backward(*grads, *ctx.saved_tensors)


def _define(schema: str, kernel: Callable[..., Any], flops: Callable[..., int]) -> None:
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    for key in ("Meta", "CPU", "CUDA"):
        torch.library.impl(LIBRARY, name, key)(kernel)
    flop_registry[getattr(torch.ops.fake_cuda, name)] = flops


def _flops(q: Any, k: Any) -> int:
    """Return the operations of both products of full attention."""
    return 4 * int(q[0] * q[1] * q[2] * q[3] * k[2])


_define(
    "flash(Tensor q, Tensor k, Tensor v) -> Tensor",
    lambda q, k, v: torch.empty_like(q),
    lambda q, k, v, **_: _flops(q.shape, k.shape) // 2,  # causal
)
_define(
    "flash_backward(Tensor g, Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor, Tensor)",
    lambda g, q, k, v: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
    lambda g, q, k, v, **_: 5 * _flops(q.shape, k.shape) // 4,
)
_define(
    "masked(Tensor q, Tensor k, Tensor v, Tensor bias) -> Tensor",
    lambda q, k, v, bias: torch.empty_like(q),
    lambda q, k, v, bias, **_: _flops(q.shape, k.shape),
)
_define(
    "rms_norm(Tensor x, Tensor w) -> (Tensor, Tensor)",
    lambda x, w: (torch.empty_like(x), x.new_empty(x.shape[:-1])),
    lambda *_, **__: 0,
)
_define(
    "rms_norm_backward(Tensor g, Tensor x, Tensor w, Tensor r) -> (Tensor, Tensor)",
    lambda g, x, w, r: (torch.empty_like(x), torch.empty_like(w)),
    lambda *_, **__: 0,
)
