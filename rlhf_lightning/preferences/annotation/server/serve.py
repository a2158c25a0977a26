"""Listening, and serving the page until it is interrupted."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from rlhf_lightning.preferences.annotation.assignment import Sharing
from rlhf_lightning.preferences.annotation.server.app import Page
from rlhf_lightning.preferences.annotation.server.connections import (
    ACCEPTED_AT_ONCE,
    Connection,
)
from rlhf_lightning.preferences.annotation.server.settings import PageSettings
from rlhf_lightning.preferences.annotation.store import LabelStore

WAITING = 256  # connections in the kernel's queue


class QuietServer(uvicorn.Server):
    """A server that sleeps until a request or a signal comes.

    Uvicorn's own loop wakes ten times a second, to look for a signal and to renew the `Date`
    header, which `Guard` writes here.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; more wait in the kernel's queue than asyncio takes out of it at once."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(WAITING)

    async def main_loop(self) -> None:
        """Wait for a signal."""
        self._loop, self._told = asyncio.get_running_loop(), asyncio.Event()
        await self.on_tick(0)
        while not self.should_exit:
            await self._told.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note the signal, and wake the loop."""
        super().handle_exit(sig, frame)
        if hasattr(self, "_told"):
            self._loop.call_soon_threadsafe(self._told.set)


def once_per_minute() -> Callable[[logging.LogRecord], bool]:
    """Return a filter of messages: requests may not fill the disk with the log."""
    said: dict[str, float] = {}

    def is_new(record: logging.LogRecord) -> bool:
        key = str(record.msg)  # without its arguments, which may be foreign text
        if record.created - said.get(key, 0.0) < 60:
            return False
        said[key] = record.created
        return True

    return is_new


class PortError(Exception):
    """The address cannot be listened on; the message says why and what to do."""


def listen(settings: PageSettings) -> socket.socket:
    """Return a socket that listens where the settings say.

    Raises:
        PortError: if the port is taken or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sends small packets at once (TCP_NODELAY) only where the protocol is named; without it
    # every page waits 40 ms for an acknowledgement.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((settings.host, settings.port))
        listening.listen(WAITING)
        return listening
    except OSError as error:
        listening.close()
        raise PortError(
            f"page.host={settings.host} page.port={settings.port} cannot be "
            f"listened on ({error.strerror}): another server may run there; "
            "page.port=0 takes a free port"
        ) from error


def serve(
    store: LabelStore,
    settings: PageSettings,
    sharing: Sharing,
    *,
    announce: Callable[[str], None],
) -> None:
    """Serve the page until the process is interrupted.

    Args:
        store: store of the labels.
        settings: settings of the page.
        sharing: rules of sharing pairs.
        announce: called with the address as soon as requests are accepted.

    Raises:
        PortError: if the address cannot be listened on.
    """
    listening = listen(settings)
    port = listening.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    config = uvicorn.Config(
        Page(store, settings, sharing, port).app(),
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="off",
        ws="none",
        http=Connection,
        backlog=ACCEPTED_AT_ONCE,
        timeout_graceful_shutdown=5,
    )
    once = once_per_minute()
    for name in ("asyncio", "uvicorn.error", Page.__module__):
        logging.getLogger(name).addFilter(once)
    with listening:
        announce(f"http://{host}:{port}/")
        QuietServer(config).run(sockets=[listening])
