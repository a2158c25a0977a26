"""Means, variances and whitening over the positions that a mask marks.

A mask is bool and True = counts. Values off the mask are replaced by `torch.where`, never
multiplied by 0: `inf * 0` and `nan * 0` are NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHITEN_EPS = 1e-8


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32, or unchanged if it is float64: sums in half precision lose digits."""
    return x if x.dtype == torch.float64 else x.float()


def zero_off_mask(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` with exact zeros off the mask, whatever was there (NaN and inf included)."""
    return torch.where(mask, x, 0)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the marked values: `sum(x on mask) / count(mask)`; 0 for an empty mask.

    Args:
        x: values, in any shape.
        mask: bool, the shape of `x`.

    Returns:
        A scalar, at least float32, with a graph if `x` has one.
    """
    total = zero_off_mask(at_least_float32(x), mask).sum()
    return total / mask.sum().clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Return the biased variance of the marked values: `sum((x - mean)^2) / count`.

    Dividing by n and not n - 1 is defined for a single token and adds up over ranks. Two passes:
    `E[x^2] - E[x]^2` cancels in float32 when the mean is large. An empty mask gives 0.

    Args:
        x: values, in any shape.
        mask: bool, the shape of `x`.

    Returns:
        A scalar, at least float32.

    Source: Ziegler et al. 2019, `whiten` of the released code (`tf.nn.moments`).
    """
    return _centred(x, mask).square().sum() / mask.sum().clamp(min=1)


def masked_whiten(
    x: Tensor, mask: Tensor, *, mean: Tensor | None = None, var: Tensor | None = None
) -> Tensor:
    """Return `(x - mean) / sqrt(var + 1e-8)` on the mask and exactly 0 off it.

    Whitening must not depend on the number of ranks: with several, give the mean and the biased
    variance of the whole batch. Without them the mask's own are used. Zero variance gives 0.

    Args:
        x: any shape, usually advantages `[B, R]`.
        mask: bool, the shape of `x`.
        mean: scalar, the mean over all ranks.
        var: scalar, the biased variance over all ranks.

    Returns:
        The shape of `x`, at least float32.

    Source: Ziegler et al. 2019, `whiten` of the released code, with a mask and global statistics.
    """
    x = at_least_float32(x)
    centred = _centred(x, mask) if mean is None else zero_off_mask(x - mean, mask)
    if var is None:
        var = masked_var(x, mask)
    return centred * torch.rsqrt(var + WHITEN_EPS)


def _centred(x: Tensor, mask: Tensor) -> Tensor:
    x = at_least_float32(x)
    residual = zero_off_mask(x - masked_mean(x, mask), mask)
    # The rounding error of the mean is taken out too: equal values become exact zeros, which
    # dividing by sqrt(1e-8) would otherwise enlarge ten thousand times.
    return zero_off_mask(residual - masked_mean(residual, mask), mask)
