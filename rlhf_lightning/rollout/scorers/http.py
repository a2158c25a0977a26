"""A reward that a service computes: texts in, numbers out, as JSON over HTTP."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

import httpx
import torch
from pydantic import Field

from rlhf_lightning.arguments import JsonObject, Name, checked
from rlhf_lightning.distributed.collectives import agreed_max
from rlhf_lightning.rollout.scorers.base import (
    LARGEST,
    ModelFree,
    Responses,
    Scores,
    response_texts_of,
)
from rlhf_lightning.rollout.scorers.hparams import HttpScorerHparams, key_in
from rlhf_lightning.text.messages import CONVERSATION, as_text
from rlhf_lightning.text.reward_text import Completion

Result = TypeVar("Result")
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before a retry; they double
FIX = "check the service, and scorer.url, scorer.request, scorer.token_env and scorer.timeout"


class ServiceError(RuntimeError):
    """A service gave no usable reply."""


def ask_service(
    hparams: HttpScorerHparams, bodies: Sequence[Any], *, key: str | None = None, fix: str = FIX
) -> list[Any]:
    """Return the JSON of a service's replies to requests, in their order.

    Connection errors, time-outs, 429 and 5xx are tried again. The service is asked directly:
    without `trust_env` no proxy of the environment sees the texts.

    Args:
        hparams: address, limits and retries.
        bodies: JSON of each request.
        key: bearer token.
        fix: ends the error of a request that is refused.

    Raises:
        ServiceError: in one line, if a request gets no reply, or none that is JSON.
    """
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    verify = ssl.create_default_context() if hparams.url.startswith("https:") else False
    with (
        ThreadPoolExecutor(hparams.concurrency) as pool,
        # Closed first: after Ctrl-C nothing is tried again.
        httpx.Client(
            headers=headers, timeout=hparams.timeout, trust_env=False, verify=verify
        ) as client,
    ):
        return list(pool.map(lambda body: _reply(client, hparams, body, fix), bodies))


def _reply(client: httpx.Client, hparams: HttpScorerHparams, body: Any, fix: str) -> Any:
    content = json.dumps(body, default=as_text).encode()
    failure, wait = "", FIRST_WAIT
    for attempt in range(hparams.max_retries + 1):
        if attempt:
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        try:
            reply = client.post(hparams.url, content=content)
        except httpx.RequestError as error:
            failure = f"{type(error).__name__} {error}"
            continue
        told = f"HTTP {reply.status_code} {' '.join(reply.text[:400].split())!r:.200}"
        if reply.status_code == 429 or reply.status_code >= 500:
            failure = told
            continue
        try:
            if reply.is_success:
                return reply.json()
        except (ValueError, RecursionError):
            told += ", which is no JSON"
        raise ServiceError(f"{hparams.url} answered {told}: {fix}")
    raise ServiceError(
        f"{hparams.url} did not answer: {failure} ({hparams.max_retries + 1} attempts): {fix}"
    )


def on_every_rank(ask: Callable[[], Result], device: torch.device, elsewhere: str) -> Result:
    """Return what `ask` returns, once it has succeeded on every rank.

    Args:
        ask: asks a service for this rank's rows.
        device: of the collective.
        elsewhere: message on the other ranks if one has failed.

    Raises:
        ServiceError: on every rank, if it was raised on one.
    """
    try:
        found: Any = ask()
    except ServiceError as error:
        found = error
    failed = isinstance(found, ServiceError)
    if agreed_max(int(failed), device):
        raise found if failed else ServiceError(f"{elsewhere}: see its error")
    return found  # type: ignore[no-any-return]


class HttpScorer(ModelFree):
    """A reward served over HTTP: POST of JSON texts, JSON numbers back.

    By default {"prompts": [...], "completions": [...]} -> {"scores": [...]}. Each rank asks for its
    own rows; if one fails, all fail together.

    Args:
        request: JSON key -> content, one entry per response: `prompts`, `completions`, `texts`
            (prompt and completion as one), `messages` (the whole conversation as a list of role and
            content), `finished`, or the name of a column of the prompts.
        extra: further keys that are sent as they are, such as a model's name.
        response: path of the scores in the reply: keys with dots between them. A list on the way is
            walked item by item: `data.score` reads {"data": [{"score": 1.0}, ...]}. Empty where the
            reply is the list itself.
        name: name of the component.
        hparams: the fields of `HttpScorerHparams`, `url` among them.
    """

    Hparams = HttpScorerHparams
    words = "a reward service"

    @checked
    def __init__(
        self,
        *,
        request: Annotated[Mapping[Name, Name], Field(min_length=1)] | None = None,
        extra: JsonObject | None = None,
        response: str = "scores",
        name: str = "http",
        **hparams: Any,
    ) -> None:
        self.hparams = HttpScorerHparams(**hparams)
        self.normalized = (self.hparams.mean, self.hparams.std) != (0.0, 1.0)
        self._key = key_in("scorer.token_env", self.hparams.token_env)
        self.request = dict(request or {"prompts": "prompts", "completions": "completions"})
        self.extra = dict(extra or {})
        if both := sorted(self.request.keys() & self.extra.keys()):
            raise ValueError(f"scorer.request and scorer.extra both have {both}: keep one of them")
        self.path = tuple(key for key in response.split(".") if key)
        self.name = name

    def __call__(self, responses: Responses) -> Scores:
        """Return the service's numbers.

        Raises:
            ServiceError: on every rank, if the service failed on one of them.
            ValueError: if `request` names a column that the prompts do not have.
        """
        rows, size = self._rows(responses), self.hparams.batch_size
        count, device = len(responses.prompts), responses.sequences.device
        starts = range(0, count, size)
        bodies = [{k: v[at : at + size] for k, v in rows.items()} | self.extra for at in starts]

        def ask() -> list[float]:
            replies = ask_service(self.hparams, bodies, key=self._key)
            found = zip(replies, starts, strict=True)
            return [s for reply, at in found for s in self._scores(reply, min(size, count - at))]

        elsewhere = f"another rank got no scores from {self.hparams.url}"
        scores = torch.tensor(on_every_rank(ask, device, elsewhere), device=device)
        total = (scores - self.hparams.mean) / self.hparams.std
        return Scores(total, {self.name: total})

    def _rows(self, responses: Responses) -> dict[str, Sequence[Any]]:
        """Return what is sent, by JSON key."""
        texts = response_texts_of(responses, thoughts=self.hparams.thoughts)
        known: dict[str, Sequence[Any]] = {
            **{k: v for k, v in responses.prompts.columns.items() if k != CONVERSATION},
            "prompts": [row.prompt for row in texts],
            "completions": [row.text for row in texts],
            "texts": [row.prompt + row.text for row in texts],
            "messages": [_messages(row) for row in texts],
            "finished": [row.finished for row in texts],
        }
        for key, content in self.request.items():
            if content not in known:
                raise ValueError(f"scorer.request.{key}={content} is none of {sorted(known)}")
        return {key: known[content] for key, content in self.request.items()}

    def _scores(self, reply: Any, count: int) -> list[float]:
        """Return the scores in a reply about `count` rows."""
        found = reply
        try:
            for key in self.path:
                found = [item[key] for item in found] if isinstance(found, list) else found[key]
        except (KeyError, TypeError, IndexError):
            found = None
        found = found if isinstance(found, list) and len(found) == count else [None]
        if not all(type(x) in (int, float) and abs(x) <= LARGEST for x in found):
            told = f"{self.hparams.url} returned {reply!r:.200} for {count} responses"
            fix = f"return a list of finite numbers at scorer.response={'.'.join(self.path)}"
            raise ServiceError(f"{told}: {fix}")
        return [float(score) for score in found]


def _messages(row: Completion) -> list[dict[str, str]]:
    given = [{"role": "user", "content": row.prompt}] if row.messages is None else row.messages
    return [*given, {"role": "assistant", "content": row.text}]
