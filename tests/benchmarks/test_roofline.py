"""Budgets of the phases of an iteration on a GPU: a better figure is a better program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("g++") is None, reason="fake CUDA tensors need g++"),
]
ROOT = Path(__file__).parents[2]
# Kernels, gigabytes that they read and write, and milliseconds of an A100. When a figure gets
# better, write it here.
BUDGETS = {
    "1b": {
        "token": (763, 7.2, 5.7),
        "score": (813, 56, 73),
        "update": (2490, 178, 225),
        "advantages": (69, 0.1, 0.2),
    },
    "8b": {
        "token": (1467, 19.2, 14.7),
        "score": (1252, 103, 188),
        "update": (4901, 397, 705),
        "advantages": (69, 0.1, 0.2),
    },
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("roofline") / "counts.json"
    # A process of its own: torch looks for a device once, at its import.
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.roofline", *BUDGETS, "--counts", "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("model", BUDGETS)
@pytest.mark.parametrize("phase", ["token", "score", "update", "advantages"])
def test_a_phase_takes_no_more_kernels_bytes_and_time_than_its_budget(counted, model, phase):
    kernels, gigabytes, milliseconds = BUDGETS[model][phase]
    found = counted[model]["counts"][phase]
    assert 0.9 * kernels < found["kernels"] <= kernels
    assert found["gigabytes"] <= gigabytes
    assert found["A100_ms"] <= milliseconds


def test_the_operations_of_1b_are_those_of_its_matrices(counted):
    layer = 2 * 2048 * (2 * 2048 + 2 * 512 + 3 * 8192)  # of a token
    head = 2 * 2048 * 128256
    trunk, answers = 16 * layer * 8 * 480, head * 8 * 300
    attention = 16 * 2 * 8 * 32 * 480 * 480 * 64  # causal
    found = {phase: 1e12 * work["teraflop"] for phase, work in counted["1b"]["counts"].items()}
    assert found["score"] == pytest.approx(trunk + answers + attention, rel=1e-3)
    # The head's logits fit one chunk, or they would be computed once more.
    assert found["update"] == pytest.approx(3 * (trunk + answers) + 3.5 * attention, rel=0.01)
