"""One of two ranks is killed, hangs, or fails alone: the other one ends too."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import Summary, read_summary
from tests.builders.command_lines import SMALL, command, environment, run_folder
from tests.builders.processes import ForkedPython
from tests.builders.ranks import free_port

pytestmark = pytest.mark.timeout(600)

TWO = ["+experiment=base", *SMALL, "trainer.accelerator=cpu", "trainer.devices=2"]
Command = tuple[list[str], dict[str, str]]
Start = Callable[..., Any]
LONG = ["trainer.limit_train_batches=null", "data.num_epochs=2000"]


class Ranks:
    """Processes of one run and their outputs."""

    def __init__(self, folder: Path, start: Start, commands: list[Command]) -> None:
        self.folder = folder
        self.processes = [
            start(arguments[1:], folder, env, folder / f"output_{number}")
            for number, (arguments, env) in enumerate(commands)
        ]

    def wait_for(self, happened: Callable[[], bool], seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert all(p.poll() is None for p in self.processes), self.output(0)[-3000:]
            assert time.monotonic() < deadline, self.output(0)[-3000:]
            time.sleep(0.05)

    def wait_for_checkpoint(self) -> None:
        self.wait_for(lambda: any(self.folder.glob("outputs/base/*/checkpoints/last.ckpt")))

    def output(self, number: int) -> str:
        return (self.folder / f"output_{number}").read_text(errors="replace")

    def error(self, number: int) -> str:
        (line,) = (t for t in self.output(number).splitlines() if t.startswith("error: "))
        return line.removeprefix("error: ")

    def summary(self) -> Summary:
        return read_summary(RunFolder(run_folder(self.folder)))


@contextmanager
def started(folder: Path, start: Start, commands: list[Command]) -> Iterator[Ranks]:
    ranks = Ranks(folder, start, commands)
    try:
        yield ranks
    finally:
        for process in ranks.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def two_ranks(
    folder: Path, *overrides: str, base: list[str] = TWO, strategy: str = "ddp"
) -> Iterator[Ranks]:
    """Two ranks of a plain environment, as Slurm starts them."""
    port = str(free_port())
    commands = []
    for rank in ("0", "1"):
        own = {
            "RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": "0", "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        commands.append((command(*base, f"strategy={strategy}", *overrides), gloo(**own)))
    return started(folder, ForkedPython, commands)


def gloo(**more: str) -> dict[str, str]:
    own = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    return environment(**own, RLHF_ALLOWED_TARGETS="tests.", **more)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_other_one(tmp_path, strategy):
    with two_ranks(tmp_path, *LONG, strategy=strategy) as ranks:
        ranks.wait_for_checkpoint()
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        assert ranks.processes[0].wait(200) == 1
        assert (ranks.summary().status, ranks.summary().cause) == ("failed", ranks.error(0))


@pytest.mark.slow
def test_a_killed_first_rank_leaves_a_run_that_never_ended(tmp_path):
    with two_ranks(tmp_path, *LONG) as ranks:
        ranks.wait_for_checkpoint()
        os.kill(ranks.processes[0].pid, signal.SIGKILL)
        assert ranks.processes[1].wait(200) == 1
        # It alone writes: resume=auto continues the run.
        assert ranks.summary().status == "running"


@pytest.mark.slow
def test_a_rank_that_hangs_is_waited_for_as_long_as_the_setting_says(tmp_path):
    with two_ranks(tmp_path, *LONG, "strategy.timeout_minutes=0.2") as ranks:
        ranks.wait_for_checkpoint()
        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        stopped = time.monotonic()
        assert ranks.processes[0].wait(300) == 1
        assert time.monotonic() - stopped > 10
        assert ranks.summary().status == "failed"


@pytest.mark.slow
def test_a_rank_that_fails_alone_says_why_and_ends_the_other_one(tmp_path):
    trouble = "tests.faults.troubled_rank.Trouble"
    with two_ranks(tmp_path, *LONG, f"+callbacks.extra.trouble._target_={trouble}") as ranks:
        assert ranks.processes[0].wait(200) == 1
        assert ranks.processes[1].wait(200) == 1
        assert ranks.error(1).startswith("KeyError")
        assert ranks.summary().status == "failed"


@pytest.mark.slow
def test_a_first_rank_that_fails_before_they_met_is_named(tmp_path):
    missing = f"artifacts.base={tmp_path / 'nothing'}"
    sft = ["+experiment=sft", *SMALL, "trainer.devices=2", missing]
    with two_ranks(tmp_path, base=sft) as ranks:
        assert [process.wait(300) for process in ranks.processes] == [2, 1]
        assert "nothing" in ranks.error(0)
        assert "rank 0 ended" in ranks.error(1)
