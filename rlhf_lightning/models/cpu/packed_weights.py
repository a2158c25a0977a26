"""Linear layers whose weights are in the blocked layout of oneDNN.

A plain call makes that layout on every call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

SMALLEST_STEP = 8
STEPS_PER_DOUBLING = 8


def kernel_rows(count: int) -> int:
    """Return the number of rows, at least `count`, that a product of oneDNN should have.

    For every number of rows and every shape of weight that it meets, oneDNN (3.12) makes kernels
    and keeps some 0.6 MiB: half of it in a cache of primitives, whose length is bounded, half of it
    until the process ends. Rows that end one by one would leave hundreds of them, and an iteration
    later others. Rounded up to a multiple of 8, above 64 by an eighth at most, they are few.
    """
    octave = max(count - 1, 1).bit_length() - 1  # 2 ** octave < count <= 2 ** (octave + 1)
    step = max(2**octave // STEPS_PER_DOUBLING, SMALLEST_STEP)
    return -(-count // step) * step


def _packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether oneDNN multiplies this dtype on this device, as fast as the hardware can."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    operators = torch.ops.mkldnn
    if not hasattr(operators, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def packed_linear(
    weight: Tensor, bias: Tensor | None, rows: int
) -> Callable[[Tensor], Tensor] | None:
    """Return `x W' + b` with `weight` packed for about `rows` rows; None where it cannot be."""
    dtype = weight.dtype
    if not _packs(weight.device, dtype):
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def forward(x: Tensor) -> Tensor:
        flat = x.to(dtype).flatten(0, -2)  # [A * Q, in]
        count = len(flat)
        flat = functional.pad(flat, (0, 0, 0, kernel_rows(count) - count))
        product: Tensor = multiply(flat, packed, bias, "none", [], "")
        return product[:count].view(*x.shape[:-1], -1)

    return forward
