"""A service on loopback that speaks OpenAI's chat format over real HTTP, well or badly."""

from __future__ import annotations

import json
import math
import re
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.builders.reward_server import Behaviour, Reply, RewardServer, running

_MARK = r"\n=====\w{8}\n"
_SHOWN = re.compile(
    rf"\[Request\]{_MARK}(.*){_MARK}\n\[Answer A\]{_MARK}(.*){_MARK}\n"
    rf"\[Answer B\]{_MARK}(.*){_MARK}\nReply",
    re.S,
)


class ChatServer(RewardServer):
    """Answers `POST /v1/chat/completions` with what a behaviour says of (request, A, B).

    It returns a text, a list of its parts, a dictionary of probabilities of tokens (sent as
    log-probabilities if they were asked for), None for a message that was cut off before its first
    character, a `Reply`, or bytes that are sent as they are.
    """

    path = "/v1"

    def __init__(self, *behaviours: Behaviour, key: str | None = None) -> None:
        super().__init__(*behaviours)
        self.key = key
        self.shown: list[tuple[str, ...]] = []

    def answer(
        self, handler: BaseHTTPRequestHandler, behaviour: Behaviour, body: dict[str, Any]
    ) -> Any:
        found = _SHOWN.search(body["messages"][-1]["content"])
        assert found is not None, body
        self.shown.append(found.groups())
        if handler.path != "/v1/chat/completions":
            return failure(404, "no such path")
        if self.key is not None and handler.headers["Authorization"] != f"Bearer {self.key}":
            return failure(401, "who are you?")
        reply = behaviour(*found.groups())
        if isinstance(reply, bytes):
            return 200, reply, {"Content-Type": "application/json"}
        return reply if isinstance(reply, tuple) else completion(body, reply)


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
        text = reply[0]["text"] if isinstance(reply, list) else reply or ""
    sent = sum(len(message["content"].split()) for message in body["messages"])
    written = len(text.split())
    content = text if isinstance(reply, dict) else reply  # parts, as some services write them
    message = {"role": "assistant", "content": content, "refusal": None}
    reason = "length" if reply is None else "stop"
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": logprobs}
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


def serving(*behaviours: Behaviour, key: str | None = None) -> AbstractContextManager[ChatServer]:
    return running(ChatServer(*behaviours, key=key))


def prefers_longer(prompt: str, a: str, b: str) -> str:
    return "[[A]]" if len(a) > len(b) else "[[B]]" if len(b) > len(a) else "[[C]]"


def always_a(prompt: str, a: str, b: str) -> str:
    return "[[A]]"


def failure(status: int, text: str = "out of order", **headers: str) -> Reply:
    return status, json.dumps({"error": {"message": text}}).encode(), headers


def failing(status: int) -> Behaviour:
    """Fail, and ask for a short pause."""
    return lambda *_: failure(status, **{"Retry-After-Ms": "10"})
