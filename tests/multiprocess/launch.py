"""Ranks as plain processes: own port, own log, one time-out, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
    interfere: Callable[[list[subprocess.Popen[bytes]]], None] | None = None,
) -> Outcome:
    """Run `python ARGUMENTS` once a rank; after one fails the others get ten seconds.

    `interfere` is called with the processes as soon as they are started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    processes = []
    for rank in range(world_size):
        own = {
            "RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": "",
            "PYTHONFAULTHANDLER": 1,
        }  # fmt: skip
        env = {**os.environ, **{k: str(v) for k, v in own.items()}, **(environment or {})}
        with (folder / f"rank_{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    cwd=working_folder,
                    env=env,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
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


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
