"""Memory and thread settings of a training process, made before torch loads.

On a CPU a training step frees and allocates the same tensors over and over. By default the C
library maps and unmaps each of the larger ones, and the kernel clears every page again: a quarter
of an update's time. Here freed pieces below 32 MiB stay with the process between allocations, and
`models.release` gives them back between phases.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_LARGEST_KEPT = 32 * 2**20  # glibc takes no more
_KEPT_AT_THE_TOP = 2**31 - 1


def prepare_process() -> None:
    """Set what torch and the C library read; what the user has set in the environment stays."""
    # libgomp's threads spin for milliseconds while they wait, which starves the other processes of
    # a busy machine; this is long enough to cost nothing on an idle one.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # Of products of matrices: oneDNN would keep 1,024, of 0.3 MiB each. To make one takes 0.3 ms.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
    if not sys.platform.startswith("linux"):
        return
    # Phases of a PPO iteration allocate in other sizes: with fixed segments CUDA's memory breaks up
    # between them. A torch before 2.9 knows the older name alone, and leaves it as it is.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & set(os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_AT_THE_TOP)


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Let torch compute on a CPU by `count` threads inside; None leaves their number to torch."""
    if count is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
