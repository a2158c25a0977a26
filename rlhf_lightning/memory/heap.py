"""What the C library holds while a run updates its models, found by asking it.

Tensors on a CPU come from the C library, which keeps what is freed for later and cannot always use
it again: glibc looks for an aligned block of a tensor's size in free blocks that are somewhat
larger, and one that stands between two small objects never grows. How much stays with the process
so depends on sizes and order. Here the allocations of an update, as they were traced, are made
anew in a process of its own (`heap_replay`), under the settings that a run makes for itself.
"""

from __future__ import annotations

import array
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from rlhf_lightning.memory.heap_replay import FIRST_FREED, PHASE, TRIM
from rlhf_lightning.memory.recording import (
    END,
    FIRST,
    FIRST_STEP,
    LATER,
    RELEASE,
    STEP,
    Key,
    Recording,
)
from rlhf_lightning.memory.tracker import NODE

# Objects that come with a tensor: TensorImpl and StorageImpl of torch 2, in bytes.
OF_A_TENSOR = (184, 104)
# With an operation that autograd keeps: its node, the edges of it, and what versions are counted
# with; then the view or tensor that comes out.
OF_A_NODE = (480, 40, 24, 24, 184)
ITERATIONS = 2  # the optimizer's state comes with the first step
SHIFTS = (0, 100, 1500)  # characters by which the environment of a replay is longer


class Allocations:
    """A sequence of allocations, put together from blocks that may be repeated."""

    def __init__(self) -> None:
        self.events = array.array("q")
        self._made = 0
        self._places: dict[tuple[str, Key], list[int]] = {}

    def add(self, name: str, recording: Recording, block: str) -> None:
        """Append a block of the recording of `name`; autograd's graph is freed at its end."""
        graph: list[int] = []
        for entry in recording.entries(block):
            if isinstance(entry, list):
                for key in entry:
                    freed = self._places.pop((name, key), ())
                    self.events.extend(FIRST_FREED - place for place in freed)
            elif entry[0] == NODE:
                graph += [self._small(size) for size in OF_A_NODE]
            else:
                size, key = entry
                tensor = self._allocate(2 * size)
                self._places[name, key] = [tensor, *map(self._small, OF_A_TENSOR)]
        self.events.extend(FIRST_FREED - place for place in graph)

    def end_phase(self, *, trim: bool = False) -> None:
        """End a phase, whose peak is then known, and give freed memory back if asked to."""
        self.events.append(PHASE)
        if trim:
            self.events.append(TRIM)

    def peaks(self) -> list[int]:
        """Return the most bytes resident in each phase, the median of several replays.

        Where blocks come to lie depends on where the heap begins and on what is in it, which a
        longer environment shifts; one layout in a few holds far less or more than the others.

        Raises:
            subprocess.CalledProcessError: if the C library has no room for them.
        """
        command = [sys.executable, "-m", "rlhf_lightning.memory.heap_replay"]
        with ThreadPoolExecutor(len(SHIFTS)) as pool:
            done = list(pool.map(lambda shift: self._replay(command, shift), SHIFTS))
        return [int(statistics.median(phase)) for phase in zip(*done, strict=True)]

    def _replay(self, command: list[str], shift: int) -> list[int]:
        done = subprocess.run(
            command,
            input=self.events.tobytes(),
            env={**os.environ, "RLHF_HEAP_SHIFT": "x" * shift},
            capture_output=True,
            check=True,
        )
        return [int(line) for line in done.stdout.split()]

    def _small(self, size: int) -> int:
        return self._allocate(2 * size + 1)

    def _allocate(self, event: int) -> int:
        self.events.append(event)
        self._made += 1
        return self._made - 1


def replayable() -> bool:
    """Tell whether this machine's C library is glibc, whose ways are known here."""
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"


def resident_in_update(
    updates: Mapping[str, Recording],
    steps: Mapping[str, Recording],
    *,
    micro_batches: int,
    minibatches: int,
    trims: bool,
) -> int:
    """Return the most bytes that the C library holds in the updates of a run.

    Args:
        updates: of each trained model, see `record_update`.
        steps: of each trained model's optimizer, see `record_steps`.
        micro_batches: of a step.
        minibatches: steps of an iteration.
        trims: freed memory is given back after each iteration.
    """
    allocations = Allocations()
    for step in range(ITERATIONS * minibatches):
        for name, update in updates.items():
            allocations.add(name, update, FIRST)
            for _ in range(micro_batches - 1):
                allocations.add(name, update, LATER)
            allocations.add(name, update, END)
        for name, recording in steps.items():
            allocations.add(name, recording, STEP if step else FIRST_STEP)
        for name, update in updates.items():
            allocations.add(name, update, RELEASE)
        if trims and (step + 1) % minibatches == 0:
            allocations.end_phase(trim=True)
    allocations.end_phase()
    return max(allocations.peaks())
