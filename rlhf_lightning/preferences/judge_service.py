"""A model behind an OpenAI-compatible endpoint: retries, a rate limit, and what it costs."""

from __future__ import annotations

import os
import random
import threading
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
    """Where a judge is and how it is asked.

    Args:
        model: its name there.
        base_url: of the endpoint, `http://127.0.0.1:8000/v1`; None is OpenAI's own.
        api_key_env: name of the environment variable that holds the key; None for a service that
            wants none.
        timeout: seconds for one request.
        max_retries: after connection errors, time-outs, 408, 409, 429 and 5xx.
        backoff: seconds before the first retry, doubled each time; at least what the service asks.
        max_backoff: seconds at most, unless the service asks for more.
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
    backoff: float = number(0.5, above=0)
    max_backoff: float = number(30.0, above=0)
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
    """Lets one request through every `60 / per_minute` seconds, whichever thread asks.

    Args:
        per_minute: None lets everything through.
    """

    def __init__(self, per_minute: float | None) -> None:
        self.interval = 0.0 if per_minute is None else 60.0 / per_minute
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self, stop: threading.Event) -> None:
        """Return when it is this caller's turn, or when `stop` is set."""
        with self._lock:
            turn = max(self._next, time.monotonic())
            self._next = turn + self.interval
        stop.wait(max(turn - time.monotonic(), 0.0))


class JudgeService:
    """Asks the endpoint; safe for several threads.

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
        self._limit = RateLimit(hparams.requests_per_minute)
        self._jitter = random.Random()
        self._client = openai.OpenAI(
            # The client wants some key, also where the service wants none.
            api_key=self._key or "none",
            base_url=hparams.base_url or "https://api.openai.com/v1",
            timeout=hparams.timeout,
            max_retries=0,  # ours are counted
        )

    def close(self) -> None:
        """End the connections."""
        self._client.close()

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Return the price of so many tokens."""
        prices = self.hparams.input_price, self.hparams.output_price
        return (input_tokens * prices[0] + output_tokens * prices[1]) / MILLION

    def ask(
        self, messages: Sequence[Mapping[str, str]], *, logprobs: bool, stop: threading.Event
    ) -> Reply:
        """Return the reply to one conversation.

        Args:
            messages: role and content.
            logprobs: ask for one token and the likeliest ones in its place.
            stop: ends waiting and retries.

        Raises:
            AnnotationError: if there is none, with what to do.
        """
        retries = 0
        while True:
            self._limit.wait(stop)
            if stop.is_set():
                raise AnnotationError("stopped")
            try:
                return self._attempt(messages, logprobs, retries)
            except self._passing as error:
                retries += 1
                wait = max(self._backoff(retries), _retry_after(error))
                if retries > self.hparams.max_retries or stop.wait(wait):
                    raise AnnotationError(
                        f"{self._where} did not answer: {self._shown(error)} ({retries} attempts). "
                        "Check that it runs and keeps up; judge.timeout, judge.max_retries and "
                        "judge.requests_per_minute say how it is asked. What was answered is kept: "
                        "continue with resume=auto"
                    ) from error

    @property
    def _passing(self) -> tuple[type[Exception], ...]:
        api = self._openai
        return (
            api.APIConnectionError,
            api.RateLimitError,
            api.InternalServerError,
            api.ConflictError,
        )

    def _attempt(
        self, messages: Sequence[Mapping[str, str]], logprobs: bool, retries: int
    ) -> Reply:
        api = self._openai
        options: dict[str, Any] = {"max_tokens": self.hparams.max_tokens}
        if logprobs:
            options = {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP_TOKENS}
        try:
            answer: Any = self._client.chat.completions.create(
                model=self.hparams.model,
                messages=messages,  # type: ignore[arg-type]
                temperature=self.hparams.temperature,
                **options,
            )
        except (api.BadRequestError, api.UnprocessableEntityError):
            return Reply(None, 0, 0, {}, retries)  # e.g. a filter of contents
        except (api.AuthenticationError, api.PermissionDeniedError) as error:
            name = self.hparams.api_key_env
            fix = f"check the key in {name}" if name else "name the key's variable: api_key_env"
            raise AnnotationError(
                f"{self._where} refuses the key: {self._shown(error)}. Fix: {fix}"
            ) from error
        except api.APIStatusError as error:
            if error.status_code == 408:
                raise api.APITimeoutError(error.request) from error
            if error.status_code in (409, 429) or error.status_code >= 500:
                raise
            raise AnnotationError(
                f"{self._where} refused the request: {self._shown(error)}. Check judge.base_url "
                "(it ends with /v1) and judge.model"
            ) from error
        except (ValueError, RecursionError) as error:  # no JSON, or too deep a one
            raise AnnotationError(
                f"{self._where} answered with something that is no JSON: {self._shown(error)}. "
                "Check judge.base_url"
            ) from error
        return self._reply(answer, logprobs, retries)

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
        return f"the judge {self.hparams.model} at {self._client.base_url}"

    def _backoff(self, attempt: int) -> float:
        longest = min(self.hparams.backoff * 2.0 ** (attempt - 1), self.hparams.max_backoff)
        return longest * self._jitter.uniform(0.5, 1.0)

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


def _retry_after(error: Exception) -> float:
    """Return the seconds of a Retry-After header; 0 without one, or if it is a date."""
    response = getattr(error, "response", None)
    value = "" if response is None else response.headers.get("retry-after", "")
    return float(value) if value.isdecimal() else 0.0
