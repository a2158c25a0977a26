"""Budgets of the kernels that a GPU is asked for: each costs the host 20 to 30 microseconds."""

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
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("g++") is None, reason="fake CUDA tensors need g++"),
]
ROOT = Path(__file__).parents[2]
# When a figure gets better, write it here.
BUDGETS = {"token": 496, "update": 2715}


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    # A process of its own: torch looks for a device once, at its import.
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.launches", "0.5b"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["0.5b"]
    return found


@pytest.mark.parametrize("phase", BUDGETS)
def test_a_phase_launches_no_more_kernels_than_its_budget(counted, phase):
    assert 0.95 * BUDGETS[phase] < counted[phase]["kernels"] <= BUDGETS[phase], counted[phase]
