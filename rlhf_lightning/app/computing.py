"""Kernels, micro-batches and threads of a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_lightning.distributed.process import cpu_threads as set_cpu_threads
from rlhf_lightning.models.attention import attention_backends as set_attention_backends
from rlhf_lightning.models.cpu_kernels import cpu_kernels as set_cpu_kernels
from rlhf_lightning.models.gpu_kernels import gpu_kernels
from rlhf_lightning.models.micro_batching import micro_batching


@contextmanager
def computing(
    *,
    cpu_kernels: bool,
    kernels: str,
    micro_batches: str,
    cpu_threads: int | None,
    attention_backends: str,
) -> Iterator[None]:
    """Compute inside by these settings of a model; see the functions that are called."""
    with (
        set_cpu_kernels(cpu_kernels),
        gpu_kernels(kernels),
        micro_batching(micro_batches),
        set_cpu_threads(cpu_threads),
        set_attention_backends(attention_backends),
    ):
        yield
