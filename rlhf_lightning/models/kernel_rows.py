"""How many rows a matrix product on a CPU is given, so that few kernels have to be kept."""

from __future__ import annotations

SMALLEST_STEP = 8
STEPS_PER_DOUBLING = 8


def kernel_rows(count: int) -> int:
    """Return the number of rows, at least `count`, that a product of oneDNN should have.

    For every number of rows and every shape of weight that it meets, oneDNN (3.12) makes kernels
    and keeps some 0.6 MiB: half of it in a cache of primitives, whose length is bounded, half of it
    until the process ends. Rows that end one by one would leave hundreds of them, and an iteration
    later others. Rounded up to a multiple of 8, above 64 by an eighth at most, they are few.
    """
    octave = max(count - 1, 1).bit_length() - 1  # 2 ** octave < count <= 2 ** (octave + 1)
    step = max(2**octave // STEPS_PER_DOUBLING, SMALLEST_STEP)
    return -(-count // step) * step
