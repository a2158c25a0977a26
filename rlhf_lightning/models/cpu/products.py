"""Products of bf16 matrices on processors that have no instruction for them.

oneDNN takes longer for them there than MKL for fp32. The factors are widened, which is
exact; the sum is one of fp32 either way, and is rounded to bf16 once.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def multiplies_bf16() -> bool:
    """Return whether the processor multiplies bf16 matrices faster than fp32 ones."""
    found = torch.cpu.get_capabilities()
    if found.get("architecture") != "x86_64":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which matrices of `dtype` are multiplied fastest, without less precision.

    The bits of a row of an fp32 product may depend on the number of rows beside it, those of a
    bf16 product do not. So this is for backward passes, and for forwards of packed rows.
    """
    return torch.float32 if dtype == torch.bfloat16 and not multiplies_bf16() else dtype


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` in the dtype of `a`, on a CPU multiplied in `product_dtype` of it."""
    dtype = product_dtype(a.dtype) if a.device.type == "cpu" else a.dtype
    return (a.to(dtype) @ b.to(dtype)).to(a.dtype)
