"""No memory is left: what a user is told, after a real allocation has failed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlhf_lightning.app import finalize
from rlhf_lightning.app.failures import explain_failure
from rlhf_lightning.app.run_summary import memory_advice
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.command_lines import SMALL, run_folder, summary, train
from tests.builders.runs import settings_for

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
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in done.stderr
    assert errors[0].startswith("error: out of memory (")
    for part in (
        "module.sft.micro_batch_size=8 (now None)",
        "model.activation_checkpointing=true",
        "lora=lora",
        "data.max_length below 96",
        "rlhf-plan +experiment=base",
    ):
        assert part in errors[0]
    assert summary(tmp_path)["status"] == "failed"
    assert summary(tmp_path)["cause"] == errors[0].removeprefix("error: ")
    folder = run_folder(tmp_path)
    assert "can't allocate memory" in (folder / "traceback.txt").read_text()
    assert (folder / "checkpoints" / "iteration=000001.ckpt").is_file()


def out_of_memory(error: BaseException) -> bool:
    failure = explain_failure(error, RunFolder("nowhere"), lambda evaluates: "change x")
    return str(failure).startswith("out of memory (") and str(failure).endswith(". change x")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (OSError(28, "No space left on device"), False),
        (RuntimeError("size mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert out_of_memory(error) is expected
    wrapped = RuntimeError("while scoring")
    wrapped.__cause__ = error
    assert out_of_memory(wrapped) is expected


class TooLarge(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):
        raise MemoryError


@pytest.mark.slow
def test_what_runs_out_of_memory_after_training_is_told_the_settings_of_the_evaluation(start):
    more = ["evaluation.micro_batch_size=6", "evaluation.max_new_tokens=40"]
    settings = settings_for("sft", start, *more)
    trainer = SimpleNamespace(optimizers=[TooLarge([torch.zeros(1, requires_grad=True)])])
    with pytest.raises(MemoryError) as caught:
        finalize._free_optimizer_state(SimpleNamespace(trainer=trainer))
    failure = explain_failure(
        caught.value,
        RunFolder("nowhere"),
        lambda evaluates: memory_advice(settings, [], evaluates=evaluates),
    )
    wanted = "evaluation.micro_batch_size=3 (now 6), evaluation.max_new_tokens below 40"
    assert wanted in str(failure)


@pytest.mark.gpu
def test_cuda_says_it_in_its_own_words():
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**50, device="cuda")
    assert out_of_memory(caught.value)
