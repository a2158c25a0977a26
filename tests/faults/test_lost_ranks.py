"""One of two ranks is killed, hangs, or fails alone: the other one ends and says why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rlhf_lightning.app.failures import describe_loss, is_lost_contact
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import Summary, read_summary
from tests.builders.command_lines import SMALL, command, environment, run_folder
from tests.builders.processes import ForkedPython, fresh_python
from tests.builders.ranks import free_port
from tests.faults.troubled_rank import HANGS

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


def one_command(folder: Path, *overrides: str) -> Iterator[Ranks]:
    """One command, from which Lightning starts the second rank."""
    return started(folder, fresh_python, [(command(*TWO, "strategy=ddp", *overrides), gloo())])


def gloo(**more: str) -> dict[str, str]:
    own = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    return environment(**own, RLHF_ALLOWED_TARGETS="tests.", **more)


def trouble(rank: int, what: str) -> list[str]:
    node = "+callbacks.extra.trouble"
    target = "tests.faults.troubled_rank.Trouble"
    return [f"{node}._target_={target}", f"{node}.rank={rank}", f"{node}.what={what}"]


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_by_the_one_that_is_left(tmp_path, strategy):
    with two_ranks(tmp_path, *LONG, strategy=strategy) as ranks:
        ranks.wait_for_checkpoint()
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        assert ranks.processes[0].wait(200) == 1
        cause = ranks.error(0)
        assert cause.startswith("rank 1 of 2 is gone (")
        assert "it was killed, or its machine is down" in cause
        assert cause.endswith("Start all ranks again with resume=auto")
        assert "Traceback" not in ranks.output(0)
        assert (ranks.summary().status, ranks.summary().cause) == ("failed", cause)


@pytest.mark.slow
def test_a_killed_first_rank_is_named_too(tmp_path):
    with two_ranks(tmp_path, *LONG) as ranks:
        ranks.wait_for_checkpoint()
        os.kill(ranks.processes[0].pid, signal.SIGKILL)
        assert ranks.processes[1].wait(200) == 1
        assert ranks.error(1).startswith("rank 0 of 2 is gone (")
        # It alone writes: the run stands as one that never ended, which resume=auto continues.
        assert ranks.summary().status == "running"


@pytest.mark.slow
def test_a_frozen_first_rank_is_named_as_well_within_the_time_out(tmp_path):
    with two_ranks(tmp_path, *LONG, "strategy.timeout_minutes=0.2") as ranks:
        ranks.wait_for_checkpoint()
        os.kill(ranks.processes[0].pid, signal.SIGSTOP)
        stopped = time.monotonic()
        assert ranks.processes[1].wait(120) == 1
        assert time.monotonic() - stopped < 60
        assert ranks.error(1).startswith("rank 0 of 2 did not answer within strategy.timeout")


@pytest.mark.slow
def test_a_rank_that_hangs_is_waited_for_as_long_as_the_setting_says(tmp_path):
    with two_ranks(tmp_path, *LONG, "strategy.timeout_minutes=0.2") as ranks:
        ranks.wait_for_checkpoint()
        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        stopped = time.monotonic()
        assert ranks.processes[0].wait(300) == 1
        assert time.monotonic() - stopped > 10
        cause = ranks.error(0)
        assert cause.startswith("rank 1 of 2 did not answer within strategy.timeout_minutes=0.2 (")
        assert ranks.summary().cause == cause


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "what", "words"),
    [
        (1, "raises", "rank 1 of 2 stopped: KeyError: 'nobody knows this'"),
        (0, "full disk", "rank 0 of 2 stopped: cannot write "),
    ],
)
def test_what_one_rank_alone_ran_into_is_told_by_the_other_one(tmp_path, rank, what, words):
    with two_ranks(tmp_path, *LONG, *trouble(rank, what)) as ranks:
        assert ranks.processes[1 - rank].wait(200) == 1
        assert ranks.processes[rank].wait(200) == 1
        assert ranks.error(1 - rank).startswith(words)
        assert ranks.error(rank) in ranks.error(1 - rank)
        if rank == 1:
            assert str(ranks.summary().cause).startswith(words)


def child_of(process: subprocess.Popen[bytes]) -> int:
    children = Path(f"/proc/{process.pid}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    (child,) = (
        pid for pid in pids if b"rlhf_lightning" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return child


@pytest.mark.slow
def test_lightning_does_not_kill_the_first_process_before_it_has_said_why(tmp_path):
    with one_command(tmp_path, *LONG) as ranks:
        ranks.wait_for_checkpoint()
        os.kill(child_of(ranks.processes[0]), signal.SIGKILL)
        assert ranks.processes[0].wait(200) == 1
        assert ranks.error(0).startswith("rank 1 of 2 is gone (")
        assert ranks.summary().cause == ranks.error(0)


@pytest.mark.slow
def test_a_first_process_that_hangs_is_killed_after_the_cause_is_written_down(tmp_path):
    """A GPU's exchange waits for a dead rank in this way."""
    with one_command(tmp_path, *LONG, *trouble(0, "hangs")) as ranks:
        # Before that it would notice by itself, in the exchange behind the checkpoint.
        ranks.wait_for(lambda: HANGS in ranks.output(0))
        child = child_of(ranks.processes[0])
        os.kill(child, signal.SIGKILL)
        assert ranks.processes[0].wait(300) == -signal.SIGKILL
        words = "rank 1 was killed by SIGKILL, and the others hang while they wait for it"
        assert ranks.error(0).startswith(words)
        assert ranks.summary().cause == ranks.error(0)
        assert json.loads((run_folder(tmp_path) / "summary.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_a_first_rank_that_fails_before_they_met_is_named(tmp_path):
    missing = f"artifacts.base={tmp_path / 'nothing'}"
    sft = ["+experiment=sft", *SMALL, "trainer.devices=2", missing]
    with two_ranks(tmp_path, base=sft) as ranks:
        assert [process.wait(300) for process in ranks.processes] == [2, 1]
        assert "nothing" in ranks.error(0)
        assert ranks.error(1).startswith("rank 0 ended, or took more than 1 day")
        assert "before it told the other ranks the inputs" in ranks.error(1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/x/gloo/tcp/pair.cc:537] Read error [::1]:1: Connection reset"), True),
        (RuntimeError("[/x/gloo/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:2"), True),
        (RuntimeError("[/x/gloo/unbound_buffer.cc:81] Timed out waiting 1000ms for recv"), True),
        (dist.DistNetworkError("Connection was likely closed"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1"), True),
        (RuntimeError("the reward service http://x: Connection reset by peer"), False),
        (OSError(104, "Connection reset by peer"), False),
        (RuntimeError("gloo is a word"), False),
        (ValueError("timed out"), False),
    ],
)
def test_what_counts_as_a_lost_rank(error, expected):
    assert is_lost_contact(error) is expected
    wrapped = RuntimeError("while it saved")
    wrapped.__cause__ = error
    assert is_lost_contact(wrapped) is expected


def test_the_first_cause_is_named_before_the_silence_of_others():
    error = RuntimeError("[/x/gloo/pair.cc:5] Read error [127.0.0.1]:1: Connection reset. More.")
    heard = {3: "later", 2: "cannot write x"}
    assert describe_loss(heard, [1], 4, error, 30) == "rank 2 of 4 stopped: cannot write x"
    assert describe_loss({}, [1, 3], 4, error, 30).startswith(
        "rank 1, 3 of 4 is gone (Read error [127.0.0.1]:1: Connection reset): it was killed"
    )
    assert describe_loss({}, [], 2, error, 30).startswith("the ranks lost contact with each other")
