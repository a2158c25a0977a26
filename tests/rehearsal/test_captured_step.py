"""A token step of `CapturedGenerator` on fake CUDA tensors: a graph can hold all of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.models import MODEL_TYPES

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="fake CUDA tensors need g++"),
]
ROOT = Path(__file__).parents[2]
# What is put into a step, and what is then said of it.
FAULTS = {
    "item": "asks for numbers of the device",
    "mask": "by a mask has a shape that the host waits for",
    "upload": "takes a tensor of the host",
    "counter": "a second step is another one",
    "rebound": "column is another tensor after a step",
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    out = tmp_path_factory.mktemp("captured_step") / "problems.json"
    # A process of its own: torch looks for a device once, at its import.
    done = subprocess.run(
        [sys.executable, "-m", "tests.rehearsal.captured_step", str(out)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[str]] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("step", [*MODEL_TYPES, "qwen3", "llama under autocast"])
def test_nothing_in_the_step_waits_copies_or_changes_from_one_token_to_the_next(problems, step):
    assert problems[step] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_is_put_into_the_step_is_found(problems, fault):
    assert any(FAULTS[fault] in problem for problem in problems[fault]), problems[fault]
