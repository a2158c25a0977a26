"""oneDNN keeps a kernel for every number of rows that it meets, so they are made few."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.rollout.generators.prepared_weights import linear_weights_prepared
from tests.builders.models import VOCABULARY, tiny_policy, tiny_scalar_model

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


@pytest.mark.thorough
@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU multiplies no bf16 by oneDNN"
)
@pytest.mark.parametrize("kind", ["policy", "scalar"])
def test_micro_batches_of_any_number_of_answer_tokens_leave_few_kernels(kind):
    model = tiny_policy("llama") if kind == "policy" else tiny_scalar_model("llama")
    input_ids = torch.zeros(4, 24, dtype=torch.long)

    def update(count: int) -> None:
        positions = torch.arange(count)
        with torch.autocast("cpu", torch.bfloat16):  # also in the backward pass, as in training
            if kind == "policy":
                numbers = model(input_ids, positions, positions % VOCABULARY).logprobs
            else:
                numbers = model(input_ids, positions)
            numbers.sum().backward()
        assert len(numbers) == count

    update(96)
    before = private_memory()
    for count in range(1, 96):
        update(count)
    assert private_memory() - before < 16 * MIB
