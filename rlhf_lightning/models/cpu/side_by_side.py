"""Two computations that share nothing, at the same time, each by half of the threads.

Within an operation torch's threads wait for each other at its end, which costs the more the more
threads there are. So policy and value model, which have no weight in common, go forward and
backward beside each other, and so do micro-batches of a forward without gradients. The bits are
those of computing in turn by half of the threads, and nothing here draws random numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

T = TypeVar("T")


def can_run_beside(models: Sequence[Any]) -> bool:
    """Return whether `models` may compute at the same time here.

    There must be several threads, all weights plain and on a CPU, and none of them in two models.
    Views of one base with adapters share that base; what counts operations or makes fake tensors
    (a dispatch mode) sees its own thread alone.

    Args:
        models: each with its `root`, the module that holds all of its weights.
    """
    if torch.get_num_threads() < 2 or _get_current_dispatch_mode() is not None:
        return False
    seen: set[int] = set()
    for model in models:
        if model.root is not model:
            return False
        weights = list(model.parameters())
        if any(type(w) is not nn.Parameter or w.device.type != "cpu" for w in weights):
            return False
        own = {id(weight) for weight in weights}
        if seen & own:
            return False
        seen |= own
    return True


def run_beside(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Return what `tasks` return, two at a time, each computed by half of torch's threads.

    Grad mode and autocast are those of the caller. Where a task fails, no other one is begun.
    """
    threads = torch.get_num_threads()
    results: list[Any] = [None] * len(tasks)
    waiting = deque(enumerate(tasks))

    def work() -> None:
        while True:
            try:
                index, task = waiting.popleft()
            except IndexError:
                return
            try:
                results[index] = task()
            except BaseException:
                waiting.clear()
                raise

    other: Future[None] = _second_thread().submit(_as_here(max(threads // 2, 1), work))
    # Holds for the calling thread, and for those that are started later.
    torch.set_num_threads(max(threads // 2, 1))
    try:
        work()
    finally:
        wait([other])
        torch.set_num_threads(threads)
    other.result()
    return results


def sum_of_losses(losses: Sequence[Tensor]) -> Tensor:
    """Return the sum of losses of separate graphs, whose backward passes run beside each other."""
    ends = [loss.detach().requires_grad_() for loss in losses]
    total: Tensor = _Sum.apply(losses, *ends)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Sequence[Tensor], *ends: Tensor) -> Tensor:
        ctx.losses = losses
        return torch.stack(ends).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        run_beside([partial(torch.autograd.backward, loss, grads[0]) for loss in ctx.losses])
        return (None,) * (1 + len(ctx.losses))


@cache
def _second_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="side_by_side")


def _as_here(threads: int, function: Callable[[], None]) -> Callable[[], None]:
    """Return `function` for another thread, under the settings of this one."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = torch.autocast(
        "cpu",
        dtype=torch.get_autocast_dtype("cpu"),
        enabled=torch.is_autocast_enabled("cpu"),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )

    def run() -> None:
        torch.set_num_threads(threads)
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), autocast:
            function()

    return run
