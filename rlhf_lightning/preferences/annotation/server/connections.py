"""Limits on connections, so that unfinished requests cannot block the page."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 15.0  # from the first byte of a request, or the connection, to the last byte
REPLY_SECONDS = 60.0  # from there on; above the time for which the store waits for others
MOST_CONNECTIONS = 500
ACCEPTED_AT_ONCE = 16  # connections that asyncio accepts before the first of them is counted


class Connection(H11Protocol):
    """A connection that ends when a request or its reply takes too long.

    Where there are too many, the one that has waited longest for the rest of a request goes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # At most half of the files that this process may open.
        self._most = min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._is_arriving = True
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0
        self._taken: object = None  # the last request that has arrived whole

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room, and wait for a request."""
        if len(self.connections) >= self._most:
            others = [each for each in self.connections if isinstance(each, Connection)]
            last = min(others, key=lambda each: (not each._is_arriving, each._since))
            self.connections.discard(last)
            last.transport.abort()
        super().connection_made(transport)
        # `client` of a request follows X-Forwarded-For, which anyone on this machine may send.
        self.app_state = {**self.app_state, "peer": self.client[0] if self.client else ""}
        self._wait(REQUEST_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        if not self._is_arriving:
            self._is_arriving = True
            self._wait(REQUEST_SECONDS)
        super().data_received(data)
        if self.cycle is not self._taken and not self.cycle.more_body:
            self._taken, self._is_arriving = self.cycle, False
            self._wait(REPLY_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _wait(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._since = self.loop.time()
        self._timer = self.loop.call_later(seconds, self.transport.abort)
