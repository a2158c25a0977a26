"""A service on loopback that speaks OpenAI's chat format over real HTTP, well or badly."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# A judge of these tests: (request, answer A, answer B) -> its reply.
Behaviour = Callable[[str, str, str], Any]
_MARK = r"\n=====\w{8}\n"
_SHOWN = re.compile(
    rf"\[Request\]{_MARK}(.*){_MARK}\n\[Answer A\]{_MARK}(.*){_MARK}\n"
    rf"\[Answer B\]{_MARK}(.*){_MARK}\nReply",
    re.S,
)


class Failure:
    """A reply that is an error of HTTP."""

    def __init__(self, status: int, text: str = "out of order", **headers: str) -> None:
        self.status = status
        self.text = text
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Odd:
    """A reply whose JSON has other values than usual: of the answer, its choice or its message."""

    def __init__(
        self, content: Any = "[[A]]", *, answer: Any = None, choice: Any = None, message: Any = None
    ) -> None:
        self.answer = answer or {}
        self.choice = choice or {}
        self.message = {"content": content} | (message or {})


class ChatServer:
    """Answers `POST /v1/chat/completions` with what `behaviours` say, each once, the last for ever.

    A behaviour returns a text, a dictionary of probabilities of tokens (sent as log-probabilities
    if they were asked for), a `Failure`, an `Odd`, or bytes that are sent as they are.
    """

    def __init__(self, *behaviours: Behaviour, key: str | None = None) -> None:
        self.behaviours = list(behaviours)
        self.key = key
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.shown: list[tuple[str, str, str]] = []
        self.times: list[float] = []
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                server.handle(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        found = _SHOWN.search(body["messages"][-1]["content"])
        assert found is not None, body
        shown = (found.group(1), found.group(2), found.group(3))
        with self._lock:
            behaviour = self.behaviours[min(len(self.requests), len(self.behaviours) - 1)]
            self.requests.append(body)
            self.headers.append(dict(handler.headers))
            self.shown.append(shown)
            self.times.append(time.monotonic())
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self._send(handler, *self._answer(handler, body, behaviour, shown))
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has hung up, as some tests want it to
        finally:
            with self._lock:
                self._at_once -= 1

    def _answer(self, handler, body, behaviour, shown) -> tuple[int, Any, dict[str, str]]:
        if handler.path != "/v1/chat/completions":
            return 404, b'{"error": {"message": "no such path"}}', {}
        if self.key is not None and handler.headers["Authorization"] != f"Bearer {self.key}":
            return 401, b'{"error": {"message": "who are you?"}}', {}
        reply = behaviour(*shown)
        if isinstance(reply, Failure):
            body = json.dumps({"error": {"message": reply.text}}).encode()
            return reply.status, body, reply.headers
        if isinstance(reply, bytes):
            return 200, reply, {}
        if isinstance(reply, Odd):
            usual = completion(body, "A")
            choice = usual["choices"][0] | reply.choice
            choice["message"] |= reply.message
            return 200, json.dumps(usual | {"choices": [choice]} | reply.answer).encode(), {}
        return 200, json.dumps(completion(body, reply)).encode(), {}

    @staticmethod
    def _send(handler, status: int, payload: Any, headers: dict[str, str]) -> None:
        handler.send_response(status)
        own = {"Content-Type": "application/json", "Content-Length": str(len(payload))}
        for name, value in {**own, **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(payload)


def completion(body: dict[str, Any], reply: Any) -> dict[str, Any]:
    """The JSON of one chat completion, tokens counted as words."""
    logprobs = None
    if isinstance(reply, dict):
        top = [{"token": t, "logprob": math.log(p), "bytes": None} for t, p in reply.items()]
        top.sort(key=lambda item: -item["logprob"])
        text = f"[[{top[0]['token']}]]"
        if body.get("logprobs"):
            text = top[0]["token"]
            logprobs = {"content": [{**top[0], "top_logprobs": top}], "refusal": None}
    else:
        text = reply if isinstance(reply, str) else reply[0]["text"]
    sent = sum(len(message["content"].split()) for message in body["messages"])
    written = len(text.split())
    content = reply if isinstance(reply, list) else text  # parts, as some services write them
    message = {"role": "assistant", "content": content, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": logprobs}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": body["model"],
        "choices": [choice],
        "usage": {
            "prompt_tokens": sent,
            "completion_tokens": written,
            "total_tokens": sent + written,
        },
    }


@contextmanager
def serving(*behaviours: Behaviour, key: str | None = None) -> Iterator[ChatServer]:
    server = ChatServer(*behaviours, key=key)
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


def prefers_longer(prompt: str, a: str, b: str) -> str:
    return "[[A]]" if len(a) > len(b) else "[[B]]" if len(b) > len(a) else "[[C]]"


def always_a(prompt: str, a: str, b: str) -> str:
    return "[[A]]"


def failing(status: int, **headers: str) -> Behaviour:
    """Fail, and ask for a short pause unless headers say otherwise."""
    return lambda *_: Failure(status, **(headers or {"Retry_After_Ms": "10"}))
