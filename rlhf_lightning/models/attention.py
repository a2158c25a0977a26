"""The kernels of `scaled_dot_product_attention` on CUDA: the only place that chooses.

PyTorch prefers cuDNN's attention on Hopper, and cuDNN builds a plan on the host for each new
combination of shape and strides: 75 to 160 ms (benchmarks/README.md). Lengths in RLHF are always
new, so everything whose shape varies uses flash, memory-efficient or plain attention. A step of
fixed shapes may use cuDNN as well, where it is the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from rlhf_lightning.models.way import Way

_way = Way("model.attention_backends", "torch")


def attention_backends(way: str) -> AbstractContextManager[None]:
    """Choose attention kernels in this way inside.

    Args:
        way: "auto": cuDNN for fixed shapes alone; "torch": what `torch.backends.cuda` allows.

    Raises:
        ValueError: for another one.
    """
    return _way.chosen_by(way)


def expect_varying_shapes() -> None:
    """Switch cuDNN's attention off in this process, unless `attention_backends("torch")` holds.

    For the whole process: activation checkpointing repeats forwards inside the backward pass, out
    of reach of a context.
    """
    if _way.name == "auto":
        torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def fixed_shapes() -> Iterator[None]:
    """Allow cuDNN's attention inside, for shapes that repeat; see `attention_backends`."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before or _way.name == "auto")
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
