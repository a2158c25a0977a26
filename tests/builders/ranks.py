"""Several ranks: as processes with one time-out, or as threads of this process.

The threads are for what `distributed/collectives.py` sums over ranks. `SimulatedRanks` takes the
place of `torch.distributed` inside that module, so the code under test is the real one. Every rank
must reduce equally often, or the run fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from rlhf_lightning.distributed import collectives
from tests.builders.processes import ForkedPython, fresh_python

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
EXCHANGE_SECONDS = 30  # that a simulated rank waits for the others


@dataclass(frozen=True)
class Outcome:
    """Exit codes and logs by rank; the code of a rank that had to be killed is None."""

    codes: list[int | None]
    logs: list[str]

    def check(self) -> None:
        if any(code != 0 for code in self.codes):
            logs = "\n".join(f"--- rank {r}:\n{log[-4000:]}" for r, log in enumerate(self.logs))
            raise AssertionError(f"the ranks ended with {self.codes}:\n{logs}")


def run_ranks(
    arguments: Sequence[str],
    *,
    world_size: int,
    folder: Path,
    timeout: float = 300,
    environment: Mapping[str, str] | None = None,
    stop_at_first_end: bool = True,
    working_folder: Path = ROOT,
    fresh: bool = False,
    interfere: Callable[[list[Any]], None] | None = None,
) -> Outcome:
    """Run `python ARGUMENTS` once a rank; after one fails the others get ten seconds.

    They are forked with the imports done unless `fresh`. `interfere` is called with the processes
    as soon as they are started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    processes: list[Any] = []
    for rank in range(world_size):
        own = {
            "RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": "",
            "PYTHONFAULTHANDLER": 1, "PYTHONPATH": ROOT,
        }  # fmt: skip
        env = {**os.environ, **{k: str(v) for k, v in own.items()}, **(environment or {})}
        if inherited := os.environ.get("PYTHONPATH"):  # packages carried to a GPU lie there
            env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], inherited])
        start = fresh_python if fresh else ForkedPython
        processes.append(start(arguments, working_folder, env, folder / f"rank_{rank}.log"))
    deadline = time.monotonic() + timeout
    try:
        if interfere is not None:
            interfere(processes)
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            if stop_at_first_end and any(p.poll() not in (None, 0) for p in processes):
                deadline = min(deadline, time.monotonic() + 10)
            time.sleep(0.05)
        codes = [p.poll() for p in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    logs = [(folder / f"rank_{r}.log").read_text(errors="replace") for r in range(world_size)]
    return Outcome(codes, logs)


def rank_reports(
    arguments: Sequence[str], folder: Path, *, world_size: int = 2, timeout: float = 300
) -> list[dict[str, Any]]:
    """Run ranks that write `rank_<number>.json` each, into `folder`; return what they hold."""
    run_ranks(arguments, world_size=world_size, folder=folder, timeout=timeout).check()
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(world_size)]


def free_port() -> int:
    """Return a port that no connection may take before it is bound: one below those of Linux."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port between 20000 and 32000")


class SimulatedRanks:
    """Ranks as threads; `run` calls a function on each of them."""

    ReduceOp = ReduceOp

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=EXCHANGE_SECONDS)
        self.slots: list[Tensor | None] = [None] * size
        self.local = threading.local()
        monkeypatch.setattr(collectives, "dist", self)

    # -- called by collectives.py

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return hasattr(self.local, "rank")

    def get_world_size(self) -> int:
        return self.size

    def get_rank(self) -> int:
        return int(self.local.rank)

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        stacked = torch.stack(self._exchange(tensor.clone()))
        tensor.copy_(stacked.sum(0) if op == ReduceOp.SUM else stacked.amax(0))

    def all_gather_object(self, values: list[Any], mine: Any) -> None:
        values[:] = self._exchange(mine)

    def _exchange(self, mine: Tensor | None) -> list[Any]:
        self.slots[self.get_rank()] = mine
        self.barrier.wait()
        slots = list(self.slots)
        self.barrier.wait()
        if len({slot is None for slot in slots}) > 1:
            raise RuntimeError("one rank reduces while another is done")
        return slots

    # -- called by tests

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Return what `function(rank)` gives on each rank."""

        def one(rank: int) -> T:
            self.local.rank = rank
            try:
                result = function(rank)
                self._exchange(None)
            except BaseException:
                self.barrier.abort()
                raise
            return result

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(one, rank) for rank in range(self.size)]
        errors = [e for f in futures if (e := f.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
