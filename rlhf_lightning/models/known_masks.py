"""Facts about masks that transformers would read from the device, while the host waits.

Before each forward it looks whether a batch of rows without a mask holds several sequences in a
row, and whether a mask that it is given masks anything. Here both are known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from transformers import masking_utils

_this_thread = threading.local()


@contextmanager
def masks_known() -> Iterator[None]:
    """Declare that each row is one sequence, and that a mask which is given masks something."""
    before = getattr(_this_thread, "known", False)
    _this_thread.known = True
    try:
        yield
    finally:
        _this_thread.known = before


def _answered(name: str, answer: Any) -> None:
    """Let a function of transformers answer at once inside `masks_known`."""
    function: Callable[..., Any] | None = getattr(masking_utils, name, None)
    if function is None:  # another version, which waits for the device
        return

    @wraps(function)
    def known(*args: Any, **kwargs: Any) -> Any:
        return answer if getattr(_this_thread, "known", False) else function(*args, **kwargs)

    setattr(masking_utils, name, known)


_answered("find_packed_sequence_indices", None)
_answered("fast_all", False)
