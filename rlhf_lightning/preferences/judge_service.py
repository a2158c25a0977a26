"""A model behind an OpenAI-compatible endpoint: retries, a rate limit, and costs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlhf_lightning.hparams import Checked, number
from rlhf_lightning.preferences.annotators import AnnotationError

NUM_SHOWN = 200  # characters of an error that a service sent
TOP_TOKENS = 20  # what the OpenAI API allows
MILLION = 1_000_000


@dataclass(frozen=True)
class JudgeHparams(Checked):
    """Endpoint, sampling, limits and prices of a judge.

    Args:
        model: its name there.
        base_url: of the endpoint, `http://127.0.0.1:8001/v1`; None is OpenAI's own.
        api_key_env: name of the environment variable that holds the key; None for a service that
            wants none.
        timeout: seconds for one request.
        max_retries: after connection errors, time-outs, 408, 409, 429 and 5xx. The client of the
            `openai` package makes them: after half a second, doubled each time up to 8 seconds, or
            after what the service asks for; where that is more than two minutes, it is an error.
        concurrency: requests at once.
        requests_per_minute: at most; None for no limit.
        temperature: of the judge's sampling.
        max_tokens: of a reply.
        input_price: of a million tokens that are sent, in the budget's currency.
        output_price: of a million tokens of replies.
        max_cost: ask no more once this is spent; requests under way still count. None for no limit.
    """

    model: str
    base_url: str | None = None
    api_key_env: str | None = "OPENAI_API_KEY"
    timeout: float = number(60.0, above=0)
    max_retries: int = number(5, at_least=0)
    concurrency: int = number(4, at_least=1)
    requests_per_minute: float | None = number(None, above=0)
    temperature: float = number(0.0, at_least=0)
    max_tokens: int = number(16, at_least=1)
    input_price: float = number(0.0, at_least=0)
    output_price: float = number(0.0, at_least=0)
    max_cost: float | None = number(None, above=0)

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if not self.model:
            raise ValueError("JudgeHparams.model is empty: name the judge as its service does")


class Reply(NamedTuple):
    """One answer of a judge.

    Args:
        text: what it wrote; None if it refused the request.
        input_tokens, output_tokens: as the service counts them; 0 where it does not.
        top_tokens: token -> log-probability at the first place, where they were asked for.
        retries: before it answered.
    """

    text: str | None
    input_tokens: int
    output_tokens: int
    top_tokens: Mapping[str, float]
    retries: int


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
    """Asks the endpoint.

    Args:
        hparams: where and how.

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
        self._key = _key(hparams.api_key_env)
        self._base_url = hparams.base_url or "https://api.openai.com/v1"
        self._limit = RateLimit(hparams.requests_per_minute)

    def client(self, stop: asyncio.Event) -> Any:
        """Return an `openai.AsyncOpenAI`, which keeps connections and makes the retries.

        Args:
            stop: once it is set, no further attempt is made.
        """

        async def before_each_attempt(_: Any) -> None:
            await self._limit.wait()
            if stop.is_set():
                raise AnnotationError("stopped")

        return self._openai.AsyncOpenAI(
            # The client wants some key, also where the service wants none.
            api_key=self._key or "none",
            base_url=self._base_url,
            timeout=self.hparams.timeout,
            max_retries=self.hparams.max_retries,
            http_client=self._openai.DefaultAsyncHttpxClient(
                event_hooks={"request": [before_each_attempt]}
            ),
        )

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Return the price of so many tokens."""
        prices = self.hparams.input_price, self.hparams.output_price
        return (input_tokens * prices[0] + output_tokens * prices[1]) / MILLION

    async def ask(
        self, client: Any, messages: Sequence[Mapping[str, str]], *, logprobs: bool
    ) -> Reply:
        """Return the reply to one conversation.

        Args:
            client: what `client()` returned.
            messages: role and content.
            logprobs: ask for one token and the likeliest ones in its place.

        Raises:
            AnnotationError: if there is none, with what to do.
        """
        api = self._openai
        options: dict[str, Any] = {"max_tokens": self.hparams.max_tokens}
        if logprobs:
            options = {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP_TOKENS}
        try:
            answer = await client.chat.completions.with_raw_response.create(
                model=self.hparams.model,
                messages=messages,
                temperature=self.hparams.temperature,
                **options,
            )
            return self._reply(answer.parse(), logprobs, answer.retries_taken)
        except (api.BadRequestError, api.UnprocessableEntityError) as error:
            return Reply(None, 0, 0, {}, _retries(error))  # e.g. a filter of contents
        except (api.APIConnectionError, api.APIStatusError) as error:
            raise AnnotationError(f"{self._where} {self._complaint(error)}") from error
        except (ValueError, RecursionError) as error:  # no JSON, or too deep a one
            raise AnnotationError(
                f"{self._where} answered with something that is no JSON: {self._shown(error)}. "
                "Check judge.base_url"
            ) from error

    def _complaint(self, error: Any) -> str:
        """Say what an error of the client means, and what to do."""
        status = getattr(error, "status_code", None)  # none without a connection
        if status is None or status in (408, 409, 429) or status >= 500:
            return (
                f"did not answer: {self._shown(error)} ({_retries(error) + 1} attempts). "
                "Check that it runs and keeps up; judge.timeout, judge.max_retries and "
                "judge.requests_per_minute say how it is asked. What was answered is kept: "
                "continue with resume=auto"
            )
        if status in (401, 403):
            name = self.hparams.api_key_env
            fix = f"check the key in {name}" if name else "name the key's variable: api_key_env"
            return f"refuses the key: {self._shown(error)}. Fix: {fix}"
        return (
            f"refused the request: {self._shown(error)}. Check judge.base_url (it ends with /v1) "
            "and judge.model"
        )

    def _reply(self, answer: Any, logprobs: bool, retries: int) -> Reply:
        try:
            choice = answer.choices[0]
            text = choice.message.content or ""
        except (AttributeError, IndexError, TypeError) as error:
            raise AnnotationError(
                f"{self._where} answered with something that is no chat completion: "
                f"{str(answer)[:NUM_SHOWN]!r}. Check judge.base_url"
            ) from error
        top: dict[str, float] = {}
        if logprobs:
            if choice.logprobs is None or not choice.logprobs.content:
                raise AnnotationError(
                    f"{self._where} returns no log-probabilities: use judge.read=text"
                )
            top = {t.token: t.logprob for t in choice.logprobs.content[0].top_logprobs}
        usage = answer.usage
        sent, written = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
        return Reply(text, sent, written, top, retries)

    @property
    def _where(self) -> str:
        return f"the judge {self.hparams.model} at {self._base_url}"

    def _shown(self, error: Exception) -> str:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        if self._key:
            text = text.replace(self._key, "***")
        return text[:NUM_SHOWN]


def _key(name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(
            f"judge.api_key_env={name}: that environment variable holds no key: export it before "
            "the run, or set api_key_env=null for a service that wants none"
        )
    return key


def _retries(error: Any) -> int:
    """Return how often the client had tried again before the attempt that this error ended."""
    return int(error.request.headers.get("x-stainless-retry-count", 0))
