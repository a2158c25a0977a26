"""oneDNN keeps a kernel for every number of rows that it meets, so they are made few."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.rollout.generators.prepared_weights import linear_weights_prepared

MIB = 2**20
pytestmark = pytest.mark.timeout(120)


def private_memory() -> int:
    """Resident bytes of this process that are no file."""
    release_freed_memory()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    pytest.skip("/proc/self/status has no RssAnon: memory is measured on Linux")


@torch.no_grad()
def test_a_generation_whose_rows_end_one_by_one_leaves_few_kernels():
    layer = torch.nn.Linear(72, 104)  # a shape that no other test has made kernels for
    with linear_weights_prepared(layer, rows=64):
        layer(torch.zeros(64, 1, 72))
        before = private_memory()
        for rows in range(63, 0, -1):
            assert layer(torch.zeros(rows, 1, 72)).shape == (rows, 1, 104)
        grown = private_memory() - before
    assert grown < 12 * MIB  # 37 MiB with a kernel for each number of rows
