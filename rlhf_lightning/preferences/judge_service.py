"""A model behind an OpenAI-compatible endpoint: retries, a rate limit, and costs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rlhf_lightning.arguments import (
    Above0,
    Address,
    AtLeast0,
    Count,
    CountOrZero,
    Name,
    Seconds,
    SecretName,
)
from rlhf_lightning.hparams import Checked
from rlhf_lightning.preferences.annotators import AnnotationError
from rlhf_lightning.rollout.scorers.hparams import check_url, key_in
from rlhf_lightning.rollout.service_client import ServiceClient, root_cause, unused_proxy

NUM_SHOWN = 200  # characters of an error that a service sent
MOST_TOKENS = 10**9  # of a request: a larger count is none
BYTES_PER_TOKEN = 3  # of a text whose tokens were not counted; overestimates
TOP_TOKENS = 20  # what the OpenAI API allows
LEAST, SLACK = -1e9, 1e-3  # of a log-probability; it may be rounded
MILLION = 1_000_000
CUT_OFF = ("length", "max_tokens", "content_filter")  # why a reply ended, in lower case
TEXTS = (None, "text", "output_text")  # parts of a content that are no thoughts
GO_ON = "use resume=auto, or in an evaluation judge.known=FOLDER/judge/judgements.jsonl"


@dataclass(frozen=True)
class JudgeHparams(Checked):
    """Endpoint, sampling, limits and prices of a judge.

    Args:
        model: name of the model at the endpoint.
        base_url: address of the endpoint, `http://127.0.0.1:8001/v1`; None is OpenAI's.
        api_key_env: name of the environment variable that holds the key; None for a service that
            wants none.
        timeout: seconds for one request.
        max_retries: attempts after connection errors, time-outs, 408, 409, 429 and 5xx. The client
            of the `openai` package makes them: after half a second, doubled each time up to 8
            seconds, or after what the service asks for; where that is more than two minutes, it is
            an error.
        concurrency: largest number of requests at once.
        requests_per_minute: limit of the rate; None for no limit.
        temperature: temperature of the judge's sampling; None leaves it to the service.
        max_tokens: longest reply in tokens, its thoughts included; None leaves it to the service.
        max_completion_tokens: the same under the name that newer services want; it replaces
            `max_tokens`.
        input_price: price of a million tokens that are sent, in the budget's currency.
        output_price: price of a million tokens of replies.
        max_cost: ask no more once this is spent; requests under way still count. None for no limit.
            Tokens that the service does not count are estimated from the text.
    """

    model: Name
    base_url: Address | None = None
    api_key_env: SecretName | None = "OPENAI_API_KEY"
    timeout: Seconds = 60.0
    max_retries: CountOrZero = 5
    concurrency: Count = 4
    requests_per_minute: Above0 | None = None
    temperature: AtLeast0 | None = 0.0
    max_tokens: Count | None = 16
    max_completion_tokens: Count | None = None
    input_price: AtLeast0 = 0.0
    output_price: AtLeast0 = 0.0
    max_cost: Above0 | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.base_url is not None:
            check_url(self.base_url, "base_url", "api_key_env")

    def options(self, *, logprobs: bool) -> dict[str, Any]:
        """Return what a request says beside model and messages; what is None is left out.

        Args:
            logprobs: ask for one token, and the likeliest ones in its place.
        """
        limit, name = self.max_tokens, "max_tokens"
        if self.max_completion_tokens is not None:
            limit, name = self.max_completion_tokens, "max_completion_tokens"
        options = {"temperature": self.temperature, name: limit and (1 if logprobs else limit)}
        if logprobs:
            options |= {"logprobs": True, "top_logprobs": TOP_TOKENS}
        return {key: value for key, value in options.items() if value is not None}


class Reply(NamedTuple):
    """One reply of a judge. Making one never raises: it is paid for, whatever its content.

    Args:
        text: text of the reply, or the service's sentence where it refused the request.
        thoughts: reasoning before the text, where the service keeps that apart.
        refused: the service would not take the request.
        cut_off: whether it ended at the limit of tokens or in a filter.
        input_tokens, output_tokens: as the service counts them, else estimated from the texts.
        top_tokens: token -> log-probability at the first place, where they were asked for.
        retries: number of failed attempts.
        uncounted: what the service sent as token counts, where that is no count.
        impossible: whether it gave an impossible count, rather than none.
        problem: what the service sent instead of the requested content; it ends the labelling.
    """

    text: str
    thoughts: str = ""
    refused: bool = False
    cut_off: bool = False
    input_tokens: int = 0
    output_tokens: int = 0
    top_tokens: Mapping[str, float] = {}
    retries: int = 0
    uncounted: str | None = None
    impossible: bool = False
    problem: str | None = None


class RateLimit:
    """Lets one request through every `60 / per_minute` seconds, whichever task asks.

    Args:
        per_minute: None lets everything through.
    """

    def __init__(self, per_minute: float | None) -> None:
        self.interval = 0.0 if per_minute is None else 60.0 / per_minute
        self._next = 0.0

    async def wait(self) -> None:
        """Return when it is this caller's turn."""
        now = time.monotonic()
        turn = max(self._next, now)
        self._next = turn + self.interval
        await asyncio.sleep(turn - now)


class JudgeService:
    """Sends requests to the endpoint of a judge.

    Args:
        hparams: endpoint, sampling and limits.

    Raises:
        ValueError: if `api_key_env` names a variable that holds no key.
        AnnotationError: if the `openai` package is not installed.
    """

    def __init__(self, hparams: JudgeHparams) -> None:
        try:
            import openai
        except ImportError as error:
            raise AnnotationError(
                "a judge needs the package openai: pip install -e '.[judge]' in the checkout"
            ) from error
        self._openai = openai
        self.hparams = hparams
        self._key = key_in("judge.api_key_env", hparams.api_key_env)
        self._base_url = hparams.base_url or "https://api.openai.com/v1"
        self._limit = RateLimit(hparams.requests_per_minute)

    def client(self, stop: asyncio.Event) -> Any:
        """Return an `openai.AsyncOpenAI`, which keeps connections and makes the retries.

        Args:
            stop: once it is set, no further attempt is made.

        Raises:
            AnnotationError: if the environment names a proxy or certificates that cannot be used.
        """

        async def before_each_attempt() -> None:
            await self._limit.wait()
            if stop.is_set():
                raise AnnotationError("stopped")

        # A proxy of the environment would read key and texts where they are not encrypted.
        secure = self._base_url.startswith("https:")
        try:
            http = ServiceClient(self.hparams.timeout, before=before_each_attempt, trust_env=secure)
        except (ImportError, OSError, ValueError) as error:
            raise AnnotationError(
                f"{self.where}: {error}: correct the environment's HTTPS_PROXY, ALL_PROXY or "
                "SSL_CERT_FILE"
            ) from error
        client = self._openai.AsyncOpenAI(
            # The client wants some key, also where the service wants none.
            api_key=self._key or "none",
            base_url=self._base_url,
            max_retries=self.hparams.max_retries,
            http_client=http,  # type: ignore[arg-type]  # httpx is taken as well as httpx2
        )
        host = urlsplit(self._base_url).hostname or ""
        if not f".{host}".endswith(".api.openai.com"):  # of an account there, by its variables
            client.organization = client.project = None
        return client

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Return the price of so many tokens."""
        prices = self.hparams.input_price, self.hparams.output_price
        return (input_tokens * prices[0] + output_tokens * prices[1]) / MILLION

    async def ask(
        self,
        client: Any,
        messages: Sequence[Mapping[str, str]],
        *,
        logprobs: bool,
        extra: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Return the reply to one conversation.

        Args:
            client: result of `client()`.
            messages: messages with role and content.
            logprobs: ask for one token and the likeliest ones in its place.
            extra: further keys of the request.

        Raises:
            AnnotationError: if there is none, with the fix.
        """
        api = self._openai
        try:
            answer = await client.chat.completions.with_raw_response.create(
                model=self.hparams.model,
                messages=messages,
                extra_body=extra,
                **self.hparams.options(logprobs=logprobs),
            )
        except (api.BadRequestError, api.UnprocessableEntityError) as error:
            return Reply(self._shown(error), refused=True, retries=_retries(error))
        except (api.APIConnectionError, api.APIStatusError) as error:
            raise AnnotationError(f"{self.where} {self._complaint(error)}") from error
        sent = "".join(message["content"] for message in messages)
        return self._reply(answer.content, sent, logprobs)._replace(retries=answer.retries_taken)

    def _complaint(self, error: Any) -> str:
        """Say what an error of the client means, and what to do."""
        status = getattr(error, "status_code", None)  # none without a connection
        if status is None or status in (408, 409, 429) or status >= 500:
            direct = status is None and not self._base_url.startswith("https:")
            proxy = unused_proxy(self._base_url) if direct else ""
            return (
                f"did not answer: {self._shown(error)} ({_retries(error) + 1} attempts){proxy}. "
                "Check the service, judge.timeout, judge.max_retries and "
                f"judge.requests_per_minute. Replies are kept: {GO_ON}"
            )
        if status in (401, 403):
            name = self.hparams.api_key_env
            fix = f"check the key in {name}" if name else "name the key's variable: api_key_env"
            return f"refuses the key: {self._shown(error)}. Fix: {fix}"
        if status < 400:
            return f"redirects (HTTP {status}), which is not followed: give judge.base_url as it is"
        return (
            f"refused the request: {self._shown(error)}. Check judge.base_url (it ends with /v1) "
            "and judge.model"
        )

    def _reply(self, body: bytes, sent: str, logprobs: bool) -> Reply:
        """Read the body of a reply to the texts `sent`."""
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        message, problem = _at(answer, "choices", 0, "message"), None
        text, thoughts = _text(_at(message, "content")), _text(_at(message, "reasoning_content"))
        called = _at(message, "tool_calls", 0, "function", "arguments")  # a verdict as a call
        text = text or (called if isinstance(called, str) else text)
        thoughts = thoughts or _text(_at(message, "reasoning")) or ""
        if not isinstance(message, dict) or text is None:
            text = self._without_key(body.decode(errors="replace"))
            problem = f"answered with something that is no chat completion: {text!r}. Check "
            problem += "judge.base_url (it ends with /v1)"
        top: dict[str, float] = {}
        if logprobs and problem is None:
            places = _at(answer, "choices", 0, "logprobs", "content")
            if not places:
                problem = "returns no log-probabilities: use judge.read=text"
            top = dict(_top_tokens(_at(places, 0, "top_logprobs")))
        counts, uncounted, impossible = [], [], False
        for name, counted in (("prompt_tokens", sent), ("completion_tokens", text + thoughts)):
            value = _at(answer, "usage", name)
            real = isinstance(value, int) and not isinstance(value, bool)
            if real and (0 if counted else -1) < value <= MOST_TOKENS:
                counts.append(value)
                continue
            counts.append(len(counted.encode(errors="replace")) // BYTES_PER_TOKEN + 1)
            uncounted.append(f"usage.{name}={str(value)[:20] if real else repr(value)[:20]}")
            impossible |= value not in (None, 0)
        return Reply(
            text or _text(_at(message, "refusal")) or "",
            thoughts,
            cut_off=str(_at(answer, "choices", 0, "finish_reason")).lower() in CUT_OFF,
            input_tokens=counts[0],
            output_tokens=counts[1],
            top_tokens=top,
            uncounted=", ".join(uncounted) or None,
            impossible=impossible,
            problem=problem,
        )

    @property
    def where(self) -> str:
        """The judge and its endpoint, for messages."""
        return f"the judge {self.hparams.model} at {self._base_url}"

    def _shown(self, error: Any) -> str:
        status = getattr(error, "status_code", None)
        if status is None:  # the client of openai says "Connection error." alone
            cause = root_cause(error)
            return self._without_key(f"{type(cause).__name__}: {cause}")
        told = _text(_at(error.body, "message")) or error.response.text
        return self._without_key(f"HTTP {status}: {told}")

    def _without_key(self, text: str) -> str:
        text = " ".join(text.split())
        return (text.replace(self._key, "***") if self._key else text)[:NUM_SHOWN]


def _at(node: Any, *path: str | int) -> Any:
    """Return the value at a path in JSON, None if it is missing."""
    for key in path:
        if isinstance(key, str):
            node = node.get(key) if isinstance(node, dict) else None
        else:
            node = node[key] if isinstance(node, list) and key < len(node) else None
    return node


def _text(content: Any) -> str | None:
    """Return a content as text: its texts together, "" for null, None for what is no text."""
    if isinstance(content, list):
        read = [part for part in content if isinstance(part, str) or _at(part, "type") in TEXTS]
        parts = [part if isinstance(part, str) else _at(part, "text") for part in read]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else "" if content is None else None


def _top_tokens(places: Any) -> Iterator[tuple[str, float]]:
    """Yield token and log-probability; what is neither text nor a possible number is left out."""
    for each in places if isinstance(places, list) else ():
        token, logprob = _at(each, "token"), _at(each, "logprob")
        if isinstance(token, str) and isinstance(logprob, int | float) and LEAST < logprob <= SLACK:
            yield token, float(logprob)


def _retries(error: Any) -> int:
    """Return how often the client had tried again before the attempt that this error ended."""
    return int(error.request.headers.get("x-stainless-retry-count", 0))
