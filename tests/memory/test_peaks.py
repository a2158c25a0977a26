"""Plans held against the peaks of real runs: the command line, watched from outside.

On a CPU one small model: a plan counts tensors, a process holds more. With CUDA: SFT, reward model
and PPO, full and LoRA, fp32 and bf16, on random weights.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks import peak_memory
from benchmarks.processes import environment
from benchmarks.resident import watch

MIB = 2**20
CACHE = "~/.cache/rlhf_lightning/smollm2-135m-instruct"
FOLDER = Path(os.environ.get("RLHF_SMOLLM2", CACHE)).expanduser()

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="resident memory is read from /proc"
)


def measured(tmp_path: Path, *options: str) -> dict[str, dict[str, float]]:
    out = ["--threads", "1", "--out", str(tmp_path / "peaks.json")]
    result = peak_memory.main([*options, *out])
    return result["summary"]["rows"]


@pytest.mark.timeout(120)
def test_what_is_watched_is_what_a_process_held(tmp_path):
    code = "x = bytearray(200 * 2**20); import time; time.sleep(0.2); del x; time.sleep(0.2)"
    small = watch([sys.executable, "-c", "pass"], environment=environment(1), folder=tmp_path)
    large = watch([sys.executable, "-c", code], environment=environment(1), folder=tmp_path)
    assert 195 * MIB < large.peak - small.peak < 210 * MIB
    assert large.private <= large.peak
    with pytest.raises(RuntimeError, match=r"ended with 3"):
        watch([sys.executable, "-c", "exit(3)"], environment=environment(1), folder=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_run_holds_little_beside_the_tensors_of_its_plan(tmp_path):
    options = ("--quick", "--stages", "sft", "--kinds", "full", "--precisions", "fp32")
    (row,) = measured(tmp_path, *options).values()
    # A model of 0.02M weights: tokenizer, records and configuration, and almost no tensors.
    assert 0 < row["planned"] < row["measured"] < row["planned"] + 128 * MIB


@pytest.mark.gpu
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", peak_memory.KINDS)
@pytest.mark.parametrize("stage", peak_memory.STAGES)
def test_tensors_on_a_gpu_take_what_the_plan_says(tmp_path, stage, kind, precision):
    # Random weights in the shape of SmolLM2-135M: next to it cuBLAS's workspaces are small.
    options = ("--device", "cuda", "--stages", stage, "--kinds", kind, "--precisions", precision)
    (row,) = measured(tmp_path, *options).values()
    assert abs(row["error"]) <= 0.15
