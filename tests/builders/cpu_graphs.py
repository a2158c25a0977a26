"""A CUDA graph on a CPU: what it computes, and on which tensors, is fixed when it is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CpuGraph(TorchDispatchMode):
    """Records the operations of `step`; `replay` runs them again on the same tensors.

    As of a CUDA graph nothing of Python is repeated, results are written where the first ones were,
    and what is read is what stands there now. Unlike one, it computes while it is captured, so the
    tensors that `step` writes are put back.
    """

    def __init__(self, step: Callable[[], None], written: list[Tensor]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        before = [tensor.clone() for tensor in written]
        with self:
            step()
        for tensor, value in zip(written, before, strict=True):
            tensor.copy_(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and record an operation."""
        out = func(*args, **(kwargs or {}))
        read = {_place(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        # Views and what is written in place are where they were.
        new = [] if any(_place(x) in read for x in made) else made
        if new or func._schema.is_mutable:
            self.calls.append((func, args, kwargs or {}, new))
        return out

    def replay(self) -> None:
        """Run everything again."""
        for func, args, kwargs, places in self.calls:
            made = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for place, value in zip(places, made, strict=False):
                place.copy_(value)


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
