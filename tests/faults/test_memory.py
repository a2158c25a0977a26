"""No memory is left: what a user is told."""

from __future__ import annotations

import pytest
import torch

from rlhf_lightning.app.failures import explain_failure
from rlhf_lightning.app.run_summary import memory_advice
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.command_lines import settings_of


def test_the_settings_that_need_less_memory_are_named_with_the_command_that_counts_it():
    words = ["+experiment=base", "data.batch_size=24"]
    advice = memory_advice(settings_of(*words), words)
    for part in ("module.sft.micro_batch_size", "data.max_length", "lora=lora"):
        assert part in advice
    assert advice.endswith("rlhf-plan +experiment=base data.batch_size=24")


def out_of_memory(error: BaseException) -> bool:
    failure = explain_failure(error, RunFolder("nowhere"), "change x")
    return str(failure).startswith("out of memory (") and str(failure).endswith(". change x")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
        (RuntimeError("size mismatch"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert out_of_memory(error) is expected
    wrapped = RuntimeError("while scoring")
    wrapped.__cause__ = error
    assert out_of_memory(wrapped) is expected


@pytest.mark.gpu
def test_cuda_says_it_in_its_own_words():
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**50, device="cuda")
    assert out_of_memory(caught.value)
