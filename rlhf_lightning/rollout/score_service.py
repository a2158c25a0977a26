"""One JSON request to a reward service: time-outs, retries, and errors that say what to do.

The connection is direct: proxies of the environment are not used, redirects are not followed, and
nothing is drawn from the global random state, which must not depend on the network.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rlhf_lightning.rollout.score_settings import HttpScorerHparams

NUM_SHOWN = 200  # characters of an answer in an error
MOST_BYTES = 32 * 2**20  # of an answer: scores of some thousand answers are a hundredth of it


class ServiceError(RuntimeError):
    """A reward service gave no usable answer."""


class _Answer(NamedTuple):
    status: int
    retry_after: float
    body: bytes


class _UnavailableError(Exception):
    """One attempt failed in a way that may pass; `wait` is what the server asked for."""

    def __init__(self, what: str, wait: float = 0.0) -> None:
        super().__init__(what)
        self.wait = wait


class RewardService:
    """Posts JSON and returns the JSON of the answer.

    Args:
        hparams: where and how.

    Raises:
        ValueError: if `token_env` names a variable that is not set, or holds no usable token.
    """

    def __init__(self, hparams: HttpScorerHparams) -> None:
        self.hparams = hparams
        self.url = hparams.url
        self._parts = urlsplit(hparams.url)
        self._token = _token(hparams.token_env)
        self._jitter = random.Random()

    def post(self, body: Mapping[str, Any], *, deadline: float, stop: threading.Event) -> Any:
        """Return the answer to one request.

        Args:
            body: what is sent, as JSON.
            deadline: `time.monotonic()` at which nobody waits any more.
            stop: ends the attempts when another request has failed.

        Raises:
            ServiceError: if no attempt succeeded, or an answer cannot be used.
        """
        payload = json.dumps(body, ensure_ascii=False).encode()
        started = time.monotonic()
        attempt = 0
        while True:
            try:
                return self._attempt(payload, deadline)
            except _UnavailableError as error:
                attempt += 1
                wait = max(self._backoff(attempt), error.wait)
                late = time.monotonic() + wait >= deadline
                if attempt > self.hparams.max_retries or late or stop.wait(wait):
                    raise ServiceError(
                        f"{self.url} did not answer: {error} ({attempt} attempts in "
                        f"{time.monotonic() - started:.1f} s). Check that the service runs and "
                        "keeps up; scorer.timeout, scorer.deadline, scorer.max_retries and "
                        "scorer.batch_size say how long it is waited for"
                    ) from error

    def _backoff(self, attempt: int) -> float:
        """Return seconds before the next attempt; the jitter keeps ranks from asking in step."""
        longest = min(self.hparams.backoff * 2.0 ** (attempt - 1), self.hparams.max_backoff)
        return longest * self._jitter.uniform(0.5, 1.0)

    def _attempt(self, payload: bytes, deadline: float) -> Any:
        seconds = min(self.hparams.timeout, deadline - time.monotonic())
        if seconds <= 0:
            raise _UnavailableError(f"scorer.deadline={self.hparams.deadline:g} s is over")
        try:
            answer = self._exchange(payload, seconds)
        except TimeoutError as error:
            raise _UnavailableError(f"no answer within {seconds:.3g} s") from error
        except ssl.SSLCertVerificationError as error:
            raise ServiceError(
                f"{self.url}: its certificate is not trusted ({error}): add its authority to the "
                "system's certificates, or set SSL_CERT_FILE"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise _UnavailableError(f"{type(error).__name__}: {error}") from error
        if answer.status == 429 or answer.status >= 500:
            what = f"HTTP {answer.status}: {self._shown(answer.body)}"
            raise _UnavailableError(what, answer.retry_after)
        if not 200 <= answer.status < 300:
            raise ServiceError(
                f"{self.url} refused the request with HTTP {answer.status}: "
                f"{self._shown(answer.body)}. {self._advice(answer.status)}"
            )
        try:
            return json.loads(answer.body)
        except (ValueError, RecursionError) as error:
            raise ServiceError(
                f"{self.url} answered HTTP {answer.status} with something that is not JSON: "
                f"{self._shown(answer.body)}. Check that scorer.url is the path that scores"
            ) from error

    def _exchange(self, payload: bytes, seconds: float) -> _Answer:
        """Send and receive, in `seconds` all together.

        The socket's own time-out only bounds the wait for the next byte, so a timer ends what
        trickles.
        """
        connection = self._connection(seconds)
        expired = threading.Event()
        try:
            connection.connect()
            timer = threading.Timer(seconds, _hang_up, (connection.sock, expired))
            timer.daemon = True
            timer.start()
            try:
                connection.request("POST", self._path(), payload, self._headers())
                response = connection.getresponse()
                body = response.read(MOST_BYTES + 1)
                if response.length and len(body) <= MOST_BYTES:  # a read of so many says nothing
                    raise http.client.IncompleteRead(body, response.length)
                answer = _Answer(response.status, _seconds(response.headers["Retry-After"]), body)
            finally:
                timer.cancel()
        except (OSError, http.client.HTTPException) as error:
            if expired.is_set():
                raise TimeoutError from error
            raise
        finally:
            connection.close()
        if expired.is_set():  # what was read may have been cut off
            raise TimeoutError
        if len(body) > MOST_BYTES:
            raise ServiceError(
                f"{self.url} answered with more than {MOST_BYTES // 2**20} MiB: "
                f"{self._shown(body[: 4 * NUM_SHOWN])}. It must return scores only; fewer answers "
                "a request are scorer.batch_size"
            )
        return answer

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        secure = self._parts.scheme == "https"
        make = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return make(str(self._parts.hostname), self._parts.port, timeout=seconds)

    def _path(self) -> str:
        query = f"?{self._parts.query}" if self._parts.query else ""
        return (self._parts.path or "/") + query

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        return headers

    def _advice(self, status: int) -> str:
        if status in (401, 403):
            if self.hparams.token_env is None:
                return "Name the environment variable that holds its token with scorer.token_env"
            return f"Check the token in the environment variable {self.hparams.token_env}"
        if 300 <= status < 400:
            return "It redirects, which is not followed: give the final address as scorer.url"
        if status == 413:
            return "Lower scorer.batch_size"
        return "Check scorer.url, scorer.request and scorer.extra against what the service expects"

    def _shown(self, body: bytes) -> str:
        text = " ".join(body.decode(errors="replace").split())
        if self._token:
            text = text.replace(self._token, "***")
        return repr(text[:NUM_SHOWN]) + ("..." if len(text) > NUM_SHOWN else "")


def _hang_up(sock: socket.socket, expired: threading.Event) -> None:
    expired.set()
    with suppress(OSError):  # it may be gone already
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _seconds(retry_after: str | None) -> float:
    """Return the seconds of a Retry-After header; 0 without one, or if it is a date."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else 0.0


def _token(name: str | None) -> str | None:
    if name is None:
        return None
    token = os.environ.get(name, "").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError(
            f"scorer.token_env={name}: that environment variable holds no token: export it before "
            "the run"
        )
    return token
