"""Generation by vLLM in separate processes, whose environment needs vLLM only.

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
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from transformers import PreTrainedModel

from rlhf_lightning.arguments import AtLeast0, Program, Seconds, StopIds, TokenId, checked
from rlhf_lightning.batches import Generation, PromptBatch
from rlhf_lightning.distributed.collectives import gathered, rank
from rlhf_lightning.rollout.generators import vllm_engine
from rlhf_lightning.rollout.generators.vllm import (
    CHECKED_ROWS,
    Request,
    VllmGenerator,
    check_responses,
)
from rlhf_lightning.rollout.generators.vllm_engine import Completion
from rlhf_lightning.rollout.generators.vllm_weights import weight_files
from rlhf_lightning.rollout.noise import RowNoise

# Of this run's ranks, interpreter and memory: vLLM would take them for its own. The memory pool of
# its sleep mode has no expandable segments, which our commands ask for.
NOT_PASSED_ON = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "NODE_", "MASTER_", "TORCHELASTIC_"),
    *("PYTHON", "VIRTUAL_ENV", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)
RESTARTS = 1  # of one server in a run
PATIENCE = 15.0  # seconds to end in order
SAME_TOLERANCE = 0.01  # nats a token, of a server that is started again with the same weights
PROBE_TOKENS = 16  # a response, for the check before the others are written in the background


class ServerLostError(RuntimeError):
    """A server has died, or does not respond in time."""


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
        self.requests = 0  # that were sent
        self.keeps_log = False  # a message names it
        self.log = Path(tempfile.mkstemp(prefix=f"rlhf_vllm_server_{number}_", suffix=".log")[1])
        ours, theirs = socket.socketpair()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(NOT_PASSED_ON)}
        own = {name: str(value) for name, value in environment.items()}
        try:
            with theirs, self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    # -P: our folder has a vllm.py, which would hide the package
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
        self.socket = ours
        self.connection = Connection(os.dup(ours.fileno()))

    def send(self, method: str, arguments: Mapping[str, Any]) -> None:
        """Send a request.

        Raises:
            ServerLostError: if the process has ended, or does not read.
        """
        self.requests += 1
        try:
            request = json.dumps([self.requests, method, arguments])
            self.connection.send_bytes(request.encode())
        except BlockingIOError as error:
            raise ServerLostError(f"vLLM's server {self.number} takes no requests") from error
        except OSError as error:
            raise self._lost() from error

    def reply(self, timeout: float) -> Any:
        """Return the result of the last request; those of requests before it are passed over.

        Raises:
            ServerLostError: if the process ends or says nothing for `timeout` seconds.
            RuntimeError: if the request failed; the message has the server's reason.
        """
        to = 0
        try:
            while to != self.requests:
                if not self.connection.poll(timeout):
                    self.keeps_log = True
                    raise ServerLostError(
                        f"vLLM's server {self.number} said nothing for {timeout:g} s (log: "
                        f"{self.log})"
                    )
                to, reply = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._lost() from error
        if "error" in reply:
            self.keeps_log = True
            told = " ".join(reply["error"].split())[:500]
            raise RuntimeError(f"vLLM's server {self.number}: {told} (log: {self.log})")
        return reply["result"]

    def end(self, patience: float = 0.0) -> None:
        """End the process and its workers; one that ends by itself within `patience` may."""
        if patience:
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a reply too
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        # Before the connection is closed: a server that is left alone removes the weights.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if not self.keeps_log:
            self.log.unlink(missing_ok=True)
        self.connection.close()
        self.socket.close()

    def _lost(self) -> ServerLostError:
        try:
            status = f"status {self.process.wait(PATIENCE)}"
        except subprocess.TimeoutExpired:
            status = "no status yet"
        lines = self.log.read_text(errors="replace").split("\n")
        # vLLM warns at every transfer about layers without weights.
        told = [line for line in lines if line.strip() and " WARNING " not in line]
        said = told[-1] if told else "nothing"
        self.keeps_log = True
        return ServerLostError(
            f"vLLM's server {self.number} ended with {status}; its last line: {said.strip()[:200]} "
            f"(log: {self.log})"
        )


class ServerPool:
    """Servers that are started together and share the rows; each is started again once.

    Args:
        python: see `VllmServerGenerator`, as the others.
    """

    def __init__(
        self,
        python: Path,
        replicas: Sequence[Mapping[str, Any]],
        *,
        timeout: float,
        start_timeout: float,
    ) -> None:
        self.python = python
        self.replicas = list(replicas)
        self.timeout, self.start_timeout = timeout, start_timeout
        self.servers: list[VllmServer] = []
        self.restarts = [0] * len(self.replicas)
        self.ended = False

    def load(self, start: dict[str, Any]) -> None:
        """Give every server the weights in `start["folder"]`; the first time, start it with them.

        Raises:
            RuntimeError: see `generate`.
        """
        if self.servers:
            source = {"weights_path": start["folder"]}
            self._replies("load", [source] * len(self.servers), lambda n: self._restarted(n, start))
            return
        self.servers += [self._server(number) for number in range(len(self.replicas))]
        for server in self.servers:
            server.send("start", start)
        for server in self.servers:
            self._started(server)

    def generate(
        self,
        asked: Sequence[Request],
        start: dict[str, Any],
        *,
        probe: tuple[Sequence[Request], list[Completion]] | None = None,
        stay_awake: bool = False,
    ) -> list[Completion]:
        """Return the responses to the rows of all ranks, one rank after the other.

        Args:
            asked: request of each rank; the settings of the first apply to all.
            start: options and folder of the weights, which must be there until this returns.
            probe: an earlier request with these weights, and its responses, which are known to be
                right: a restarted server has to give them again.
            stay_awake: leave the weights in a server that gives them up between generations.

        Raises:
            RuntimeError: with the cause, if a server cannot be started, is lost for the second
                time, refuses a request or uses other weights than before.
        """
        count = len(self.servers)
        shares = _dealt(asked, count)

        def restarted(number: int) -> VllmServer:
            server = self._restarted(number, start)
            if probe is not None:
                server.send("generate", _dealt(probe[0], count)[number] | {"stay_awake": True})
                _check_same(server.reply(self.timeout), probe[1][number::count], number)
            return server

        requests = [share | {"stay_awake": stay_awake} for share in shares]
        replies = self._replies("generate", requests, restarted)
        num_rows = sum(len(share["rows"]) for share in shares)
        return [replies[row % count][row // count] for row in range(num_rows)]

    def end(self) -> None:
        """End all servers; none is started again."""
        self.ended = True
        for server in self.servers:
            server.end(PATIENCE)

    def _replies(
        self,
        method: str,
        requests: Sequence[dict[str, Any]],
        restarted: Callable[[int], VllmServer],
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
                self._count_loss(number, error)
                replies.append(self._asked_again(method, request, restarted, number))
        return replies

    def _asked_again(
        self,
        method: str,
        request: dict[str, Any],
        restarted: Callable[[int], VllmServer],
        number: int,
    ) -> Any:
        try:
            server = restarted(number)
            server.send(method, request)
            return server.reply(self.timeout)
        except ServerLostError as error:
            self._count_loss(number, error)
            raise

    def _count_loss(self, number: int, error: ServerLostError) -> None:
        if self.ended:
            raise error
        if self.restarts[number] == RESTARTS:
            raise RuntimeError(f"{error}; it had been started again before") from error
        self.restarts[number] += 1
        warnings.warn(f"{error}: it is started again, once", stacklevel=2)

    def _restarted(self, number: int, start: dict[str, Any]) -> VllmServer:
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


def _dealt(asked: Sequence[Request], count: int) -> list[dict[str, Any]]:
    """Return the arguments of `Engine.generate` for each server."""
    rows = [row for request in asked for row in request.rows]
    seeds = [seed for request in asked for seed in request.seeds]
    settings = asked[0].settings
    return [{"rows": rows[i::count], "seeds": seeds[i::count], **settings} for i in range(count)]


def _check_same(again: Sequence[Completion], before: Sequence[Completion], number: int) -> None:
    """Raise RuntimeError if a server's responses to the same prompts come from other weights."""
    gaps: list[float] = []
    for (tokens, logprobs), (old_tokens, old_logprobs) in zip(again, before, strict=True):
        # Rounding may pick another token, and nothing after it can be compared.
        same = [a == b for a, b in zip(tokens, old_tokens, strict=False)]
        length = same.index(False) if False in same else len(same)
        gaps += [abs(a - b) for a, b in zip(logprobs[:length], old_logprobs, strict=False)]
    gap = sum(gaps) / len(gaps) if gaps else float("inf")
    if before and gap > SAME_TOLERANCE:
        raise RuntimeError(
            f"vLLM's server {number}, started again, differs by {gap:.3f} nats a token from what "
            "was sampled with these weights before: some weight has not arrived"
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
        logprob_tolerance: largest mean gap, see `VllmGenerator`.
        engine: options of the engine, see `VllmGenerator`; `tensor_parallel_size` is per replica.

    Raises:
        ValueError: without replicas.
    """

    sends_weights = True  # a layer at a time: see `gathers_layers`

    @checked
    def __init__(
        self,
        stop_ids: StopIds,
        pad_token_id: TokenId,
        *,
        python: Program,
        replicas: Annotated[Sequence[Mapping[str, Any]], Field(min_length=1)] = ({},),
        timeout: Seconds = 600.0,
        start_timeout: Seconds = 600.0,
        logprob_tolerance: AtLeast0 = 0.05,
        engine: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(stop_ids, pad_token_id, logprob_tolerance=logprob_tolerance, engine=engine)
        self.pool = ServerPool(Path(python), replicas, timeout=timeout, start_timeout=start_timeout)
        self.under_way: Future[list[Completion]] | None = None  # on rank 0
        weakref.finalize(self, self.pool.end)  # at the end of this process too

    @property
    def checked_rows(self) -> int:
        """Number of rows of a rank's batch that are compared: one of each server at least."""
        return max(CHECKED_ROWS, len(self.pool.replicas))

    def responses(self, model: PreTrainedModel, request: Request) -> list[Completion]:
        """Send the weights of `model`, and return what the servers write with them.

        Raises:
            RuntimeError: see `ServerPool.generate`.
        """
        with self._sent(model) as start:
            asked = gathered(request)
            return _own(asked, self._responses(asked, start))

    @torch.no_grad()
    def begin(
        self,
        model: PreTrainedModel,
        prompts: PromptBatch,
        *,
        noise: RowNoise,
        temperature: float,
        max_new_tokens: int,
    ) -> Callable[[], Generation]:
        """Send the weights, and return a function that waits for the responses.

        They are written while `model` may be trained on: its weights of now are checked before this
        returns, on the first tokens of some rows. Every rank has to call both functions.

        Raises:
            RuntimeError: see `__call__`. What becomes of the servers later is raised by the
                function that waits.
        """
        request = self.request(prompts, noise, temperature, max_new_tokens)
        probe = request.beginnings(self.checked_rows, PROBE_TOKENS)
        with ExitStack() as stack:
            start = stack.enter_context(self._sent(model))
            probes = gathered(probe)
            written = self._responses(probes, start, stay_awake=True)
            own = _own(probes, written)
            check_responses(own, probe, num_tokens=model.config.vocab_size)
            self.check_logprobs(model, probe, own)
            asked = gathered(request)
            if rank() == 0:
                self.under_way = _in_background(
                    lambda: self.pool.generate(asked, start, probe=(probes, written))
                )
            sent = stack.pop_all()  # the files have to be there until all is written

        under_way, num_tokens = self.under_way, model.config.vocab_size

        def generation() -> Generation:
            with sent:
                made = gathered([] if under_way is None else under_way.result())[0]
            own = _own(asked, made)
            return self.generation(prompts, request, own, num_tokens=num_tokens)

        return generation

    @contextmanager
    def _sent(self, model: PreTrainedModel) -> Iterator[dict[str, Any]]:
        """Give the servers the weights of `model`; yield what one is started with."""
        if self.under_way is not None:
            self.under_way.result()
        options = self.options_for(model)
        first = rank() == 0
        with weight_files(model, getattr(torch, options["dtype"]), write=first) as folder:
            start = {"folder": str(folder), "options": options}
            if first:
                self.pool.load(start)
            yield start

    def _responses(
        self, asked: Sequence[Request], start: dict[str, Any], **how: Any
    ) -> list[Completion]:
        """Return the responses to the rows of all ranks, on every rank."""
        made = self.pool.generate(asked, start, **how) if rank() == 0 else []
        responses: list[Completion] = gathered(made)[0]
        return responses


def _own(asked: Sequence[Request], responses: Sequence[Completion]) -> list[Completion]:
    """Return the responses to this rank's rows."""
    before = sum(len(request.rows) for request in asked[: rank()])
    return list(responses[before : before + len(asked[rank()].rows)])


def _in_background(function: Callable[[], list[Completion]]) -> Future[list[Completion]]:
    """Run `function` in a thread that does not hold up the end of this process."""
    future: Future[list[Completion]] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
