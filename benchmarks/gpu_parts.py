"""The parts of a day on a GPU, in order of worth: tests that only CUDA passes, then measurements.

Must not import torch: the program that starts the parts holds no memory of a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import ROOT

MINUTE = 60
MIRROR = "tests/rehearsal/test_mirror.py"
PARITY = ("tests/rehearsal/test_training.py", "tests/rehearsal/test_command_lines.py")
SHARDED = "tests/multiprocess/test_on_gpus.py"
# What the part `memory` measures, with the same assertions about the plan.
MEMORY = "tests/memory/test_peaks.py"
VLLM = Path(os.environ.get("VLLM_PYTHON", ROOT / ".vllm/bin/python"))
# Parts with one shape write its models once.
MODELS = ("--models", str(ROOT / "benchmarks/.gpu_day/models"))
QUICK = ("--quick", "--device", "cpu", "--threads", "1", "--repeats", "1")


@dataclass(frozen=True)
class Part:
    """One command, its limit, and its small stand-in for a machine without a GPU.

    Args:
        name: of the part, and `gpu_NAME.json` of its result.
        shows: what, in the table.
        command: module and arguments; of tests those of pytest.
        rehearsal: likewise, on a CPU and on the second device in Python.
        limit: seconds.
        tests: the command is pytest's, and the result is made from its report.
        timed: its seconds count, so nothing else runs beside it.
        missing: returns why the part cannot run on this machine, or None.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]
    limit: int
    tests: bool = False
    timed: bool = False
    missing: Callable[[], str | None] = lambda: None

    @property
    def result(self) -> str:
        """File of the result."""
        return f"gpu_{self.name}.json"


def _tests(
    name: str, shows: str, on_gpu: tuple[str, ...], here: tuple[str, ...], limit: int
) -> Part:
    return Part(name, shows, ("-m", "gpu", *on_gpu), here, limit, tests=True)


def _measured(
    name: str,
    shows: str,
    benchmark: str,
    on_gpu: tuple[str, ...],
    here: tuple[str, ...],
    *,
    timed: bool = True,
) -> Part:
    module = f"benchmarks.{benchmark}"
    command = (module, "--device", "cuda", "--repeats", "1", *on_gpu)
    return Part(name, shows, command, (module, *QUICK, *here), 8 * MINUTE, timed=timed)


def _ppo(name: str, shape: str, shows: str, *overrides: str) -> Part:
    """Return PPO iterations of this project in bf16, the first of each not counted."""
    own = ("--only", "ours", "--precisions", "bf16")
    counted = ("--shape", shape, *MODELS, "--warmup", "1", "--iterations", "2")
    return _measured(
        name, shows, "ppo_iteration", (*own, *counted, *_changed(*overrides)),
        (*own, *_changed(*overrides)),
    )  # fmt: skip


def _generation(name: str, shape: str, shows: str) -> Part:
    engines = ("--engines", "ours", "bf16 weights")
    return _measured(
        name, shows, "generation",
        ("--shape", shape, *MODELS, "--iterations", "2", *engines),
        ("--iterations", "1", *engines),
    )  # fmt: skip


def _changed(*overrides: str) -> tuple[str, ...]:
    return ("--overrides", *overrides) if overrides else ()


def _peaks(stage: str) -> Part:
    return _measured(
        f"memory_{stage}",
        f"memory of {stage} against `rlhf-plan`, 135M, full and LoRA",
        "peak_memory",
        ("--stages", stage, "--precisions", "bf16"),
        ("--stages", stage, "--kinds", "full", "--precisions", "fp32"),
        timed=False,
    )


def no_vllm() -> str | None:
    """Return why vLLM cannot be tested."""
    return None if VLLM.exists() else f"no {VLLM.name} of an environment with vLLM (make vllm)"


def gpu_tests() -> tuple[str, ...]:
    """Return the test files that have tests for a GPU and are in no part of their own."""
    own = {*PARITY, SHARDED, MEMORY}
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    named = {str(f.relative_to(ROOT)): f.read_text(encoding="utf-8") for f in files}
    return tuple(name for name, text in named.items() if "mark.gpu" in text and name not in own)


def parts() -> tuple[Part, ...]:
    """Return all parts, the one that is worth most first."""
    return (
        _tests("tests", "tests that need CUDA", gpu_tests(), (MIRROR,), 5 * MINUTE),
        _tests(
            "nccl",
            "FSDP2 over NCCL on 1, 2 and 4 GPUs: exports of one CPU process",
            (SHARDED,),
            ("-k", "cpu and sft", SHARDED),
            9 * MINUTE,
        ),
        _tests(
            "parity",
            "weights and metrics of every stage against the CPU",
            PARITY,
            ("-k", "of_the_cpu and sft and not lora and not cuda", PARITY[0]),
            9 * MINUTE,
        ),
        _generation("generation_0.5b", "0.5b", "generation, 0.5B: `rollout=cached`"),
        _ppo("ppo_0.5b", "0.5b", "PPO iteration, 0.5B"),
        *map(_peaks, ("sft", "reward", "ppo")),
        _ppo("ppo_1b", "1b", "PPO iteration, 1B"),
        _generation("generation_1b", "1b", "generation, 1B: `rollout=cached`"),
        _measured("logprob_memory", "memory of log-probabilities", "logprob_memory", (), ()),
        Part(
            "vllm",
            "vLLM: weights, log-probabilities, failures",
            ("-k", "vllm]", "tests/rollout/test_generate_vllm.py"),
            ("-k", "did_not_arrive and stand-in", "tests/rollout/test_generate_vllm.py"),
            9 * MINUTE,
            tests=True,
            missing=no_vllm,
        ),
    )


def command(
    part: Part, results: Path, *, rehearse: bool, python: str = sys.executable
) -> list[str]:
    """Return the command line of a part."""
    words = part.rehearsal if rehearse else part.command
    if part.tests:
        report = f"--junit-xml={results / part.name}.xml"
        return [python, "-m", "pytest", "-q", "--timeout", str(part.limit), report, *words]
    return [python, "-m", *words, "--out", str(results / part.result)]


def device_count() -> int:
    """Return the number of CUDA devices, as torch sees them in a process of its own."""
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)
