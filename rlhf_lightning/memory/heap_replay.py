"""Replays allocations through this machine's C library and prints what would be resident.

A program of its own (`python -m rlhf_lightning.memory.heap_replay`), so that nothing else shares
its heap. It writes to almost none of the memory that it asks for: a table keeps which pages a run
would have written to.

Reads int64 numbers from standard input, as `heap.Allocations` makes them: twice the size of a
tensor in bytes; twice the size of another object, plus one; `FIRST_FREED - n` where the n-th of
them is freed; `TRIM` where freed memory is given back to the system; `PHASE` at the end of a phase.
Prints the most bytes that were resident in each phase, a line each.
"""

from __future__ import annotations

import array
import ctypes
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rlhf_lightning.process_settings import prepare_process

TRIM, PHASE, FIRST_FREED = -1, -2, -3
PAGE = 4096
ALIGNMENT = 64  # of tensors
PAGES = 2**24  # in the table: 64 GiB of heap
NONE, WRITTEN = b"\0", b"\1"


class Heap:
    """The heap of this process, and which of its pages have been written to since they came."""

    def __init__(self) -> None:
        self.pages = bytearray(PAGES)
        self.written = memoryview(bytearray(WRITTEN * PAGES))
        self.none = memoryview(bytearray(PAGES))
        libc: Any = ctypes.CDLL(None)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._aligned = _declared(libc.memalign, pointer, size, size)
        self._plain = _declared(libc.malloc, pointer, size)
        self._free = _declared(libc.free, None, pointer)
        self._break = _declared(libc.sbrk, pointer, ctypes.c_ssize_t)
        self._trim = _declared(libc.malloc_trim, ctypes.c_int, size)
        self.live: dict[int, int] = {}
        self.count = 0  # of pages that are resident, mapped blocks included
        prepare_process()
        self.begin = self.end = int(self._break(0))

    def allocate(self, size: int) -> int:
        """Return the address of a new tensor, all of which is written to."""
        address = self._aligned(ALIGNMENT, size)
        if not address:
            raise MemoryError(f"the C library has no {size} bytes of addresses")
        self.live[address] = size
        first, last = self._pages(address, size)
        if self._mapped(address):
            self.count += last - first
        else:
            self.count += self.pages.count(NONE, first, last)
            self.pages[first:last] = self.written[: last - first]
        return int(address)

    def allocate_small(self, size: int) -> int:
        """Return the address of an object that counts for nothing but for where it lies."""
        return int(self._plain(size))

    def free(self, address: int) -> None:
        """Free a block; the pages of a mapped one go back at once."""
        size = self.live.pop(address, 0)
        if not size:
            self._free(address)
            return
        if self._mapped(address):
            first, last = self._pages(address, size)
            self.count -= last - first
        self._free(address)
        self._cut()

    def trim(self) -> None:
        """Give free pages back, as `models.release` does."""
        self._trim(0)
        self._cut()
        kept = bytearray(PAGES)
        mapped = 0
        for address, size in self.live.items():
            first, last = self._pages(address, size)
            if self._mapped(address):
                mapped += last - first
            else:
                kept[first:last] = self.written[: last - first]
        self.pages = kept
        self.count = kept.count(WRITTEN) + mapped

    def _mapped(self, address: int) -> bool:
        return not self.begin <= address < max(self.end, int(self._break(0)))

    def _pages(self, address: int, size: int) -> tuple[int, int]:
        address -= self.begin
        return address // PAGE, -(-(address + size) // PAGE)

    def _cut(self) -> None:
        """Forget the pages above the heap's end, where it has become shorter."""
        end = int(self._break(0))
        if end < self.end:
            first, last = self._pages(end, self.end - end)
            self.count -= self.pages.count(WRITTEN, first, last)
            self.pages[first:last] = self.none[: last - first]
        self.end = end


def _declared(function: Any, result: Any, *arguments: Any) -> Callable[..., Any]:
    function.restype, function.argtypes = result, arguments
    return function  # type: ignore[no-any-return]


def replay(events: array.array[int]) -> Iterator[int]:
    """Yield the most bytes that were resident in each phase."""
    heap = Heap()
    addresses = array.array("Q", bytes(8 * sum(event >= 0 for event in events)))
    made, peak = 0, 0
    for event in events:
        if event >= 0:
            small = event % 2
            addresses[made] = (heap.allocate_small if small else heap.allocate)(event // 2)
            made += 1
            if heap.count > peak:
                peak = heap.count
        elif event == TRIM:
            heap.trim()
        elif event == PHASE:
            yield peak * PAGE
            peak = heap.count
        else:
            heap.free(addresses[FIRST_FREED - event])


def main() -> None:
    """Run the command line."""
    events = array.array("q")
    events.frombytes(sys.stdin.buffer.read())
    for peak in replay(events):
        sys.stdout.write(f"{peak}\n")


if __name__ == "__main__":
    main()
