"""Giving memory that was freed back to the system."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import sys
from functools import cache
from typing import Any


def release_freed_memory() -> None:
    """Let the C library return free pages to the system, where it can (glibc).

    It keeps what was freed for the next allocation. After weights were loaded in fp32 and rounded,
    or after the activations of an update, that is hundreds of megabytes that stand empty while the
    next phase allocates in other sizes. Elsewhere than on Linux this does nothing.
    """
    trim = _malloc_trim()
    if trim is not None:
        gc.collect(0)
        trim(0)


@cache
def _malloc_trim() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(
            ctypes.CDLL(ctypes.util.find_library("c") or "libc.so.6"), "malloc_trim", None
        )
    except OSError:  # another C library
        return None
