"""Count the bytes of every tensor while a computation runs on fake tensors.

Fake tensors have shapes, dtypes and a device but no numbers, so a forward and backward pass of an
8B model allocates nothing and still runs every operation that the real one runs. What is alive at
each moment, activations kept by autograd and temporaries included, is thus known exactly and for
any architecture, where a formula would hold for one family and one version of its code.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ACTIVATIONS = "activations"
GRADIENTS = "gradients"
CASTS = "weight casts"
HEAD = "logits"
CACHE = "KV cache"

Bytes = Mapping[str, int]  # category -> bytes


class Tracker(TorchDispatchMode):
    """Keeps the bytes that are alive, by category, and their peak in each segment.

    Tensors that exist before it is entered, such as the weights, are not counted. The peak of a
    segment is the moment at which most is alive, all categories together.
    """

    def __init__(self, weights: nn.Module | None = None) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peaks: dict[str, dict[str, int]] = {}
        self.segment = "all"
        self.default = ACTIVATIONS
        self.before_peak: Callable[[], None] = lambda: None
        self._known: dict[int, tuple[str, int]] = {}
        self._weights: set[int] = set()
        self._ignored: set[int] = set()
        for tensor in () if weights is None else (*weights.parameters(), *weights.buffers()):
            self._weights.add(_key(tensor))
        self._ignored |= self._weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count what it allocates."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf, self._category(func, args))
        return result

    def count(self, tensor: Tensor, category: str) -> None:
        """Count `tensor` from now until it is freed, unless its storage is known already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._ignored:
            return
        size = int(storage.nbytes())
        self._known[key] = (category, size)
        weakref.finalize(storage, self._free, key).atexit = False
        self.live[category] += size
        self._note_peak()

    def relabel(self, tensor: Tensor, category: str) -> None:
        """Move a counted tensor to another category."""
        key = _key(tensor)
        if key in self._known:
            old, size = self._known[key]
            self._known[key] = (category, size)
            self.live[old] -= size
            self.live[category] += size

    def forget(self, tensor: Tensor) -> None:
        """Count a tensor no longer."""
        key = _key(tensor)
        if key in self._known:
            self._free(key)
        self._ignored.add(key)

    def enter(self, segment: str, default: str = ACTIVATIONS) -> None:
        """Begin a segment, at whose start what is alive counts too."""
        self.segment, self.default = segment, default
        self._note_peak()

    def _category(self, func: Any, args: Any) -> str:
        copies = func is torch.ops.aten._to_copy.default
        if copies and args and isinstance(args[0], Tensor) and _key(args[0]) in self._weights:
            return CASTS
        return self.default

    def _note_peak(self) -> None:
        best = self.peaks.get(self.segment)
        if best is None or self.live.total() > sum(best.values()):
            self.before_peak()
            self.peaks[self.segment] = dict(self.live)

    def _free(self, key: int) -> None:
        if key in self._known:
            category, size = self._known.pop(key)
            self.live[category] -= size


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
