"""No memory is left: what a user is told, after a real allocation has failed."""

from __future__ import annotations

import pytest
import torch

from rlhf_lightning.app.failures import explain_failure
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.command_lines import SMALL, run_folder, summary, train

pytestmark = pytest.mark.timeout(240)


@pytest.mark.slow
def test_a_run_that_runs_out_of_memory_names_the_settings_that_need_less(tmp_path):
    overrides = [
        "+experiment=base",
        *SMALL,
        "model.from_scratch.hidden_size=256",
        "model.from_scratch.intermediate_size=4096",
        "data.batch_size=24",
        "data.num_epochs=3",
        "+callbacks.extra.tight._target_=tests.faults.tight_memory.TightMemory",
    ]
    done = train(tmp_path, *overrides, RLHF_ALLOWED_TARGETS="tests.")
    assert done.returncode == 1, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert "out of memory" in done.stderr
    for key in ("module.sft.micro_batch_size", "lora=lora", "data.max_length"):
        assert key in done.stderr
    assert summary(tmp_path)["status"] == "failed"
    assert (run_folder(tmp_path) / "checkpoints" / "iteration=000001.ckpt").is_file()


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
