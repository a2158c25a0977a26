"""A reward that a service computes: texts in, numbers out, as JSON over HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar

import httpx
import torch
from torch import nn

from rlhf_lightning.arguments import JsonObject, Name, checked
from rlhf_lightning.batches import CONVERSATION
from rlhf_lightning.distributed.collectives import agreed_max
from rlhf_lightning.rollout.concurrent_requests import request_all, run_async
from rlhf_lightning.rollout.scorers.base import Responses, Scores, response_texts_of
from rlhf_lightning.rollout.scorers.functions import LARGEST
from rlhf_lightning.rollout.scorers.hparams import HttpScorerHparams
from rlhf_lightning.rollout.service_client import (
    MOST_BYTES,
    ServiceClient,
    key_in,
    root_cause,
    unused_proxy,
)
from rlhf_lightning.runs.reading import loads
from rlhf_lightning.text.messages import as_text
from rlhf_lightning.text.reward_texts import ResponseText

Result = TypeVar("Result")
NUM_SHOWN = 200  # characters of a reply in an error


class ServiceError(RuntimeError):
    """A reward service gave no usable reply."""


class _UnavailableError(Exception):
    """One attempt failed in a way that may pass; `wait` is what the server asked for."""

    def __init__(self, what: str, wait: float = 0.0) -> None:
        super().__init__(what)
        self.wait = wait


class Advice(NamedTuple):
    """The fix that a message about a service names, one field for each kind of failure."""

    late: str = ", or raise scorer.timeout, scorer.deadline or scorer.max_retries"
    large: str = "It must return scores only; fewer responses a request are scorer.batch_size"
    no_json: str = "Check that scorer.url is the path that scores"
    redirects: str = "give the final address as scorer.url"
    too_large: str = "Lower scorer.batch_size"
    refused: str = (
        "Check scorer.url, scorer.request and scorer.extra against what the service expects"
    )
    no_token: str = "Name the environment variable that holds its token with scorer.token_env"


class JsonService:
    """Posts JSON and returns the JSON of the reply.

    Args:
        hparams: address, limits and retries.
        advice: the fixes that messages name.

    Raises:
        ValueError: if `token_env` names a variable that is not set, or holds no usable token.
    """

    def __init__(self, hparams: HttpScorerHparams, advice: Advice | None = None) -> None:
        self.hparams = hparams
        self.advice = advice or Advice()
        self.url = hparams.url
        self._token = key_in("scorer.token_env", hparams.token_env)
        self._jitter = random.Random()

    def client(self) -> ServiceClient:
        """Return the connections for one call of the scorer.

        The service is asked directly and as its URL says: without `trust_env` no proxy of the
        environment sees the texts, or stands between a rank and a service on its own machine, and
        no password of `.netrc` is sent. Certificates are those of the system or `SSL_CERT_FILE`.
        """
        secure = self.url.startswith("https:")
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        return ServiceClient(
            headers=headers,
            trust_env=False,
            verify=ssl.create_default_context() if secure else False,
        )

    async def post(self, client: ServiceClient, body: Mapping[str, Any], *, deadline: float) -> Any:
        """Return the reply to one request.

        Args:
            client: client that keeps the connections.
            body: the content, as JSON.
            deadline: `time.monotonic()` at which the last attempt ends.

        Raises:
            ServiceError: if no attempt succeeded, or a reply cannot be used.
        """
        payload = json.dumps(body, ensure_ascii=False).encode()
        started = time.monotonic()
        attempt = 0
        while True:
            try:
                return await self._attempt(client, payload, deadline)
            except _UnavailableError as error:
                attempt += 1
                wait = max(self._backoff(attempt), error.wait)
                if attempt > self.hparams.max_retries or time.monotonic() + wait >= deadline:
                    raise ServiceError(
                        f"{self.url} did not answer: {error} ({attempt} attempts in "
                        f"{time.monotonic() - started:.1f} s). Check the service{self.advice.late}"
                    ) from error
                await asyncio.sleep(wait)

    def _backoff(self, attempt: int) -> float:
        """Return seconds before the next attempt; the jitter keeps ranks from asking in step."""
        longest = min(self.hparams.backoff * 2.0 ** (attempt - 1), self.hparams.max_backoff)
        return longest * self._jitter.uniform(0.5, 1.0)

    async def _attempt(self, client: ServiceClient, payload: bytes, deadline: float) -> Any:
        seconds = min(self.hparams.timeout, deadline - time.monotonic())
        if seconds <= 0:
            raise _UnavailableError(f"its {self.hparams.deadline:g} s (deadline) are over")
        try:
            async with asyncio.timeout(seconds):
                reply = await client.post(self.url, content=payload)
        except TimeoutError as error:
            raise _UnavailableError(f"no reply within {seconds:.3g} s") from error
        except httpx.InvalidURL as error:
            raise ServiceError(f"url={self.url}: {error}: correct it") from error
        except httpx.RequestError as error:
            cause = root_cause(error)
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise ServiceError(
                    f"{self.url}: its certificate is not trusted ({cause}): add its authority to "
                    "the system's certificates, or set SSL_CERT_FILE"
                ) from error
            found = f"{type(cause).__name__}: {cause}{unused_proxy(self.url)}"
            raise _UnavailableError(found) from error
        status, body = reply.status_code, reply.content
        if len(body) > MOST_BYTES:
            raise ServiceError(
                f"{self.url} answered with more than {MOST_BYTES // 2**20} MiB: "
                f"{self._shown(body)}. {self.advice.large}"
            )
        if status == 429 or status >= 500:
            what = f"HTTP {status}: {self._shown(body)}"
            raise _UnavailableError(what, _seconds(reply.headers.get("Retry-After")))
        if not 200 <= status < 300:
            raise ServiceError(
                f"{self.url} refused the request with HTTP {status}: "
                f"{self._shown(body)}. {self._advice(status)}"
            )
        try:
            return loads(body)
        except ValueError as error:
            raise ServiceError(
                f"{self.url} answered HTTP {status} with something that is no JSON, or too deep: "
                f"{self._shown(body)}. {self.advice.no_json}"
            ) from error

    def _advice(self, status: int) -> str:
        if status in (401, 403):
            if self.hparams.token_env is None:
                return self.advice.no_token
            return f"Check the token in the environment variable {self.hparams.token_env}"
        if 300 <= status < 400:
            return f"It redirects, which is not followed: {self.advice.redirects}"
        if status == 413:
            return self.advice.too_large
        return self.advice.refused

    def _shown(self, body: bytes) -> str:
        return self.shown(" ".join(body[: 8 * NUM_SHOWN].decode(errors="replace").split()))

    def shown(self, value: Any) -> str:
        """Return a value of a reply in a few characters, without the token."""
        text = repr(value)
        if self._token:
            text = text.replace(self._token, "***")
        return text if len(text) <= NUM_SHOWN else f"{text[:NUM_SHOWN]}..."


def _seconds(retry_after: str | None) -> float:
    """Return the seconds that a Retry-After header asks for, as a number or a date; 0 for none."""
    try:
        seconds = float(retry_after or 0)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(str(retry_after)).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return seconds if seconds > 0 else 0.0


def on_every_rank(ask: Callable[[], Result], device: torch.device, elsewhere: str) -> Result:
    """Return what `ask` returns, once it has succeeded on every rank.

    Args:
        ask: asks a service for this rank's rows.
        device: of the collective.
        elsewhere: message on the other ranks if one has failed.

    Raises:
        ServiceError: on every rank, if it was raised on one.
    """
    found: list[Result] = []
    failure: ServiceError | None = None
    try:
        found.append(ask())
    except ServiceError as error:
        failure = error
    if agreed_max(int(failure is not None), device):
        raise failure or ServiceError(f"{elsewhere}: see its error")
    return found[0]


Rows = Mapping[str, Sequence[Any]]


class HttpScorer:
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
    loads_no_model = True
    words = "a reward service"

    @checked
    def __init__(
        self,
        *,
        request: Mapping[Name, Name] | None = None,
        extra: JsonObject | None = None,
        response: str = "scores",
        name: str = "http",
        **hparams: Any,
    ) -> None:
        self.hparams = HttpScorerHparams(**hparams)
        self.normalized = (self.hparams.mean, self.hparams.std) != (0.0, 1.0)
        self.service = JsonService(self.hparams)
        default = {"prompts": "prompts", "completions": "completions"}
        self.request = default if request is None else dict(request)
        self.extra = dict(extra or {})
        if not self.request:
            raise ValueError("scorer.request is empty: name at least one of prompts, completions")
        if both := sorted(self.request.keys() & self.extra.keys()):
            raise ValueError(f"scorer.request and scorer.extra both have {both}: keep one of them")
        self.path = tuple(key for key in response.split(".") if key)
        self.name = name

    def build(self, base: Any = None) -> list[nn.Module]:
        """Return no models."""
        return []

    def __call__(self, responses: Responses) -> Scores:
        """Return the service's numbers.

        Raises:
            ServiceError: on every rank, if the service failed on one of them.
            ValueError: if `request` names a column that the prompts do not have.
        """
        rows = self._rows(responses)
        device = responses.sequences.device
        values = on_every_rank(
            lambda: run_async(lambda: self._ask(rows, len(responses.prompts))),
            device,
            f"another rank got no scores from {self.hparams.url}",
        )
        scores = torch.tensor(values, device=device)
        total = (scores - self.hparams.mean) / self.hparams.std
        return Scores(total, {self.name: total})

    def _rows(self, responses: Responses) -> Rows:
        """Return what is sent, by JSON key."""
        texts = response_texts_of(responses, thoughts=self.hparams.thoughts)
        known: dict[str, Sequence[Any]] = {
            **{
                name: json.loads(json.dumps(values, default=as_text))
                for name, values in responses.prompts.columns.items()
                if name != CONVERSATION
            },
            "prompts": [row.prompt for row in texts],
            "completions": [row.completion for row in texts],
            "texts": [row.prompt + row.completion for row in texts],
            "messages": [_messages(row) for row in texts],
            "finished": [row.finished for row in texts],
        }
        for key, content in self.request.items():
            if content not in known:
                raise ValueError(
                    f"scorer.request.{key}={content} is not there: use one of {sorted(known)}"
                )
        return {key: known[content] for key, content in self.request.items()}

    async def _ask(self, rows: Rows, num_rows: int) -> list[float]:
        """Return one number a row; the requests of a call share its deadline."""
        deadline = time.monotonic() + self.hparams.deadline
        size = self.hparams.batch_size
        async with self.service.client() as client:

            async def scores_of(first: int) -> list[float]:
                batch = {key: list(values[first : first + size]) for key, values in rows.items()}
                reply = await self.service.post(client, batch | self.extra, deadline=deadline)
                return self._scores(reply, first, min(size, num_rows - first))

            starts = range(0, num_rows, size)
            found = await request_all(scores_of, starts, concurrency=self.hparams.concurrency)
        return [score for scores in found for score in scores]

    def _scores(self, reply: Any, first: int, count: int) -> list[float]:
        """Return the scores in a reply about `count` rows from row `first` on.

        Raises:
            ServiceError: if scores are missing, too many or not finite.
        """
        found = self._find(reply, self.path)
        if not isinstance(found, list) or len(found) != count:
            got = f"{len(found)} scores" if isinstance(found, list) else type(found).__name__
            raise ServiceError(
                f"{self.hparams.url} returned {got} for {count} responses: it must return a list "
                f"with one number a response, in their order{self._where()}"
            )
        for row, value in enumerate(found):
            if not _is_finite(value):
                raise ServiceError(
                    f"{self.hparams.url} returned {self.service.shown(value)} as the score of "
                    f"response {first + row}: it must return finite numbers of float32"
                    f"{self._where()}"
                )
        return [float(value) for value in found]

    def _find(self, node: Any, path: tuple[str, ...]) -> Any:
        if not path:
            return node
        if isinstance(node, list):
            return [self._find(item, path) for item in node]
        if isinstance(node, dict) and path[0] in node:
            return self._find(node[path[0]], path[1:])
        keys = isinstance(node, dict)
        there = f"the keys {self.service.shown(sorted(node))}" if keys else self.service.shown(node)
        raise ServiceError(
            f"{self.hparams.url} answered without {path[0]!r}, there is {there}: name the place of "
            "the scores with scorer.response=KEY.KEY"
        )

    def _where(self) -> str:
        return f", under {'.'.join(self.path)}" if self.path else ""


def _messages(row: ResponseText) -> list[dict[str, str]]:
    given = [{"role": "user", "content": row.prompt}] if row.messages is None else row.messages
    return [*given, {"role": "assistant", "content": row.completion}]


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= LARGEST
