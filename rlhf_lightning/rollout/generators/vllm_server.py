"""Generation by vLLM in processes of its own, which need an environment with vLLM alone.

Rank 0 starts the servers and talks to them; the prompts of all ranks are dealt to them in turn.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import tempfile
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf_lightning.distributed.collectives import gathered, rank
from rlhf_lightning.rollout.generators import vllm_engine
from rlhf_lightning.rollout.generators.vllm import CHECKED_ROWS, VllmGenerator
from rlhf_lightning.rollout.generators.vllm_engine import Answer
from rlhf_lightning.rollout.generators.vllm_weights import weight_files

# Of this run's ranks and interpreter: vLLM would take them for its own.
NOT_PASSED_ON = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "NODE_", "MASTER_", "TORCHELASTIC_"),
    *("PYTHON", "VIRTUAL_ENV", "OMP_NUM_THREADS"),
)
RESTARTS = 1  # of one server in a run
PATIENCE = 15.0  # seconds to end in order


class ServerLostError(RuntimeError):
    """A server has died, or does not answer in time."""


class VllmServer:
    """One process with one engine.

    Args:
        number: its name in messages.
        python: interpreter of an environment with vLLM.
        environment: further variables of the process.
        timeout: seconds that it may take to accept a request, or to send what it has begun to.

    Raises:
        FileNotFoundError: if there is no such interpreter.
    """

    def __init__(
        self, number: int, python: Path, environment: Mapping[str, Any], *, timeout: float
    ) -> None:
        self.number = number
        self.log = Path(tempfile.mkstemp(prefix=f"rlhf_vllm_server_{number}_", suffix=".log")[1])
        ours, theirs = socket.socketpair()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(NOT_PASSED_ON)}
        own = {name: str(value) for name, value in environment.items()}
        try:
            with theirs, self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    # -P: our folder, which has a vllm.py of its own, is no place to import from
                    [python, "-P", vllm_engine.__file__, str(theirs.fileno())],
                    env=inherited | own,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is ours, and the workers end with it
                )
        except OSError as error:
            self.log.unlink()
            raise FileNotFoundError(
                f"rollout.python={python} cannot be run ({error.strerror}): `make vllm` or `make "
                "vllm-cpu` makes that environment, or use rollout=cached"
            ) from error
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", max(int(timeout), 1), 0))
        self.connection = Connection(ours.detach())

    def send(self, method: str, arguments: Mapping[str, Any]) -> None:
        """Send a request.

        Raises:
            ServerLostError: if the process has ended, or does not read.
        """
        try:
            self.connection.send_bytes(json.dumps({method: arguments}).encode())
        except BlockingIOError as error:
            raise ServerLostError(f"vLLM's server {self.number} takes no requests") from error
        except OSError as error:
            raise self._lost() from error

    def reply(self, timeout: float) -> Any:
        """Return the result of the last request.

        Raises:
            ServerLostError: if the process ends or says nothing for `timeout` seconds.
            RuntimeError: if the request failed; the message has the server's reason.
        """
        try:
            if not self.connection.poll(timeout):
                raise ServerLostError(f"vLLM's server {self.number} said nothing for {timeout:g} s")
            reply = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._lost() from error
        if "error" in reply:
            raise RuntimeError(f"vLLM's server {self.number}: {reply['error']} (log: {self.log})")
        return reply["result"]

    def end(self, patience: float = 0.0) -> None:
        """End the process and its workers; one that ends by itself within `patience` may."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
            self.log.unlink(missing_ok=True)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _lost(self) -> ServerLostError:
        try:
            status = f"status {self.process.wait(PATIENCE)}"
        except subprocess.TimeoutExpired:
            status = "no status yet"
        lines = self.log.read_text(errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "nothing")
        return ServerLostError(
            f"vLLM's server {self.number} ended with {status}; its last line: {said.strip()[:200]} "
            f"(log: {self.log})"
        )


class VllmServerGenerator(VllmGenerator):
    """Continues prompts with vLLM in other processes; every call sends the weights first.

    A server that dies or hangs is started again once; the second time ends the run.

    Args:
        stop_ids: ids that end a response.
        pad_token_id: fills what follows a response.
        python: interpreter of an environment with vLLM.
        replicas: one server each, with these environment variables: the GPUs it may use
            (`CUDA_VISIBLE_DEVICES`), or its threads.
        timeout: seconds for one transfer of weights, or for the responses to one batch.
        start_timeout: seconds for a server to start.
        logprob_tolerance: see `VllmGenerator`.
        engine: see `VllmGenerator`; `tensor_parallel_size` is of one replica.

    Raises:
        ValueError: without replicas.
    """

    sends_weights = True  # a layer at a time: see `gathers_layers`

    def __init__(
        self,
        stop_ids: Sequence[int],
        pad_token_id: int,
        *,
        python: str,
        replicas: Sequence[Mapping[str, Any]] = ({},),
        timeout: float = 600.0,
        start_timeout: float = 600.0,
        logprob_tolerance: float = 0.05,
        engine: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(stop_ids, pad_token_id, logprob_tolerance=logprob_tolerance, engine=engine)
        if not replicas:
            raise ValueError("rollout.replicas=[] has no server: [{}] is one")
        self.python = Path(python)
        self.replicas = list(replicas)
        self.timeout, self.start_timeout = timeout, start_timeout
        self.restarts = [0] * len(self.replicas)
        self.servers: list[VllmServer] = []
        weakref.finalize(self, _end_all, self.servers)  # at the end of this process too

    @property
    def checked_rows(self) -> int:
        """How many rows of a rank's batch are compared: one of each server at least."""
        return max(CHECKED_ROWS, len(self.replicas))

    def answers(
        self,
        model: PreTrainedModel,
        rows: list[list[int]],
        seeds: list[int],
        settings: dict[str, Any],
    ) -> list[Answer]:
        """Send the weights of `model`, and return what the servers write with them.

        Raises:
            RuntimeError: with the cause, if a server cannot be started, is lost for the second
                time or refuses a request.
        """
        options = self.options_for(model)
        asked = gathered((rows, seeds))
        dtype = getattr(torch, options["dtype"])
        with weight_files(model, dtype, write=rank() == 0) as folder:
            made = self._all_answers(folder, options, asked, settings) if rank() == 0 else []
            answers: list[Answer] = gathered(made)[0]
        before = sum(len(others) for others, _ in asked[: rank()])
        return answers[before : before + len(rows)]

    def _all_answers(
        self,
        folder: Path,
        options: dict[str, Any],
        asked: Sequence[tuple[list[list[int]], list[int]]],
        settings: dict[str, Any],
    ) -> list[Answer]:
        start = {"folder": str(folder), "options": options}
        count = len(self.replicas)
        if not self.servers:
            self.servers += [self._server(number) for number in range(count)]
            for server in self.servers:
                server.send("start", start)
            for server in self.servers:
                self._started(server)
        else:
            self._replies("load", [{"weights_path": str(folder)}] * count, start)
        rows = [row for own, _ in asked for row in own]
        seeds = [seed for _, own in asked for seed in own]
        shares = [
            {"rows": rows[i::count], "seeds": seeds[i::count], **settings} for i in range(count)
        ]
        dealt = self._replies("generate", shares, start)
        return [dealt[row % count][row // count] for row in range(len(rows))]

    def _replies(
        self, method: str, requests: Sequence[dict[str, Any]], start: dict[str, Any]
    ) -> list[Any]:
        """Return each server's reply to its request; one that is lost is started again."""
        lost: dict[int, ServerLostError] = {}
        for server, request in zip(self.servers, requests, strict=True):
            try:
                server.send(method, request)
            except ServerLostError as error:
                lost[server.number] = error
        deadline = time.monotonic() + self.timeout
        replies = []
        for number, request in enumerate(requests):
            try:
                if number in lost:
                    raise lost[number]
                left = max(deadline - time.monotonic(), 0.0)
                replies.append(self.servers[number].reply(left))
            except ServerLostError as error:
                server = self._restarted(number, error, start)
                server.send(method, request)
                replies.append(server.reply(self.timeout))
        return replies

    def _restarted(self, number: int, error: ServerLostError, start: dict[str, Any]) -> VllmServer:
        if self.restarts[number] == RESTARTS:
            raise RuntimeError(f"{error}; it had been started again before") from error
        self.restarts[number] += 1
        warnings.warn(f"{error}: it is started again, once", stacklevel=2)
        self.servers[number].end()
        self.servers[number] = self._server(number)
        self.servers[number].send("start", start)
        self._started(self.servers[number])
        return self.servers[number]

    def _server(self, number: int) -> VllmServer:
        environment = self.replicas[number]
        return VllmServer(number, self.python, environment, timeout=self.timeout)

    def _started(self, server: VllmServer) -> None:
        try:
            server.reply(self.start_timeout)
        except ServerLostError as error:
            server.end()
            raise RuntimeError(f"{error}, while it was started") from error


def _end_all(servers: Sequence[VllmServer]) -> None:
    for server in servers:
        server.end(PATIENCE)
