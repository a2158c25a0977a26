"""Connections to a service that may be broken or hostile."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any
from urllib.request import getproxies_environment

import httpx

MOST_BYTES = 32 * 2**20  # of a body: scores of some thousand responses are a hundredth of it
_PACKED = ("gzip", "x-gzip", "deflate")
_OF_TRANSFER = (b"content-encoding", b"content-length", b"transfer-encoding")


class ServiceClient(httpx.AsyncClient):
    """An HTTP client whose exchanges end, and that contacts only the named host.

    A request has one limit of time for all its steps. At most `MOST_BYTES` + 1 bytes of a body are
    read, counted as unpacked. Redirects are returned, not followed: they would take the texts
    elsewhere.

    Args:
        seconds: limit from the connection to the last byte; None for no limit.
        before: awaited before each request, outside its limit.
        options: keyword arguments of `httpx.AsyncClient`.
    """

    def __init__(
        self,
        seconds: float | None = None,
        *,
        before: Callable[[], Awaitable[None]] | None = None,
        **options: Any,
    ) -> None:
        options["headers"] = {"Accept-Encoding": "gzip"} | dict(options.get("headers") or {})
        super().__init__(timeout=None, limits=httpx.Limits(), **options)
        self._seconds = seconds
        self._before = before

    async def send(self, request: httpx.Request, **_: Any) -> httpx.Response:
        """Return the response, its body read.

        Raises:
            httpx.RequestError: if there is none, or its limit of time is over.
        """
        if self._before is not None:
            await self._before()
        body = bytearray()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._seconds):
                response = await super().send(request, stream=True, follow_redirects=False)
                unpack = _unpacking(response)
                async with aclosing(response):
                    async for chunk in response.aiter_raw():
                        body += unpack(chunk, MOST_BYTES + 1 - len(body))
                        if len(body) > MOST_BYTES:
                            break
                return httpx.Response(
                    response.status_code,
                    headers=[h for h in response.headers.raw if h[0].lower() not in _OF_TRANSFER],
                    content=bytes(body[: MOST_BYTES + 1]),
                    request=request,
                )
        raise httpx.ReadTimeout(f"no reply within {self._seconds:.3g} s", request=request)


def _unpacking(response: httpx.Response) -> Callable[[bytes, int], bytes]:
    """Return what makes at most so many bytes of a body from a part of it.

    httpx would unpack a whole part at once, and one that was packed twice twice.
    """
    if response.headers.get("Content-Encoding", "").strip().lower() not in _PACKED:
        return lambda part, most: part[:most]
    stream = zlib.decompressobj(wbits=47)  # with the header of gzip or zlib

    def unpack(part: bytes, most: int) -> bytes:
        try:
            return stream.decompress(part, most)
        except zlib.error as error:
            raise httpx.DecodingError(str(error), request=response.request) from error

    return unpack


def root_cause(error: BaseException) -> BaseException:
    """Return what the errors of httpx and the libraries below it began with: it says the most."""
    inner: BaseException | None = error
    while inner is not None:
        error = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else inner
        inner = error.__cause__ or error.__context__  # they raise "from None", too
    return error


def unused_proxy(url: str) -> str:
    """Return a sentence on the proxy that the environment names for a URL asked directly, or ""."""
    named = getproxies_environment().keys() & {url.partition(":")[0].lower(), "all"}
    names = " and ".join(f"{scheme.upper()}_PROXY" for scheme in sorted(named))
    return f". {names} of the environment is not used: give an address that needs none" * bool(
        names
    )
