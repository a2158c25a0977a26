"""A reward service on loopback that behaves, or misbehaves, as a test says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

# What a test answers a request with: a status, a body, and headers.
Reply = tuple[int, bytes, dict[str, str]]
Behaviour = Callable[..., Any]
S = TypeVar("S", bound="RewardServer")


class RewardServer:
    """Answers POST with what `behaviour` returns for the request's JSON.

    A number of them in a row answer one request each, the last one all further requests. A
    behaviour returns a `Reply`, or something that is sent as JSON with status 200.
    """

    path = "/score"

    def __init__(self, *behaviours: Behaviour, port: int = 0) -> None:
        self.behaviours = list(behaviours)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.handle(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}{self.path}"

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            behaviour = self.behaviours[min(len(self.requests), len(self.behaviours) - 1)]
            self.requests.append(body)
            self.headers.append(dict(handler.headers))
            self.paths.append(handler.path)
            self.times.append(time.monotonic())
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            reply = self.answer(handler, behaviour, body)
        finally:
            with self._lock:
                self._at_once -= 1  # before the reply: the client may send its next one at once
        # A client that has hung up is what some tests want.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._reply(handler, reply)

    def answer(
        self, handler: BaseHTTPRequestHandler, behaviour: Behaviour, body: dict[str, Any]
    ) -> Any:
        return behaviour(body)

    @staticmethod
    def _reply(handler: BaseHTTPRequestHandler, reply: Any) -> None:
        if callable(reply):  # writes to the connection itself
            reply(handler)
            return
        if not isinstance(reply, tuple):
            reply = (200, json.dumps(reply).encode(), {"Content-Type": "application/json"})
        status, payload, headers = reply
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(payload)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(payload)


@contextmanager
def running(server: S) -> Iterator[S]:
    thread = threading.Thread(
        target=server.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join(5)


def serving(*behaviours: Behaviour, port: int = 0) -> AbstractContextManager[RewardServer]:
    return running(RewardServer(*behaviours, port=port))


def lengths(body: dict[str, Any]) -> dict[str, Any]:
    """The reward of these tests: characters of the completion, minus those of the prompt."""
    pairs = zip(body["prompts"], body["completions"], strict=True)
    return {"scores": [len(completion) - len(prompt) for prompt, completion in pairs]}


def failing(status: int, text: str = "out of order", **headers: str) -> Behaviour:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda body: (status, text.encode(), named)


def slow(seconds: float, behaviour: Behaviour = lengths) -> Behaviour:
    def wait(body: dict[str, Any]) -> Any:
        time.sleep(seconds)
        return behaviour(body)

    return wait


def hanging_up(body: dict[str, Any]) -> Any:
    """Half of an answer, then nothing."""

    def write(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"scores": [1.0')

    return write
