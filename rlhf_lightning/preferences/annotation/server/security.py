"""What every request must pass, and what every answer carries: an ASGI layer around the page.

A foreign `Host` is what a browser sends when a name of somebody else was made to point here (DNS
rebinding); a foreign `Origin` is another site's form. Both are refused before anything is read.
"""

from __future__ import annotations

from collections.abc import Collection
from email.utils import formatdate
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Nothing but our own files may run or be loaded, nothing may be framed, forms lead nowhere else.
# The referrer policy may not be `no-referrer`: a browser would then send `Origin: null`.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Robots-Tag": "noindex",
}
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class Guard:
    """Refuses requests for other hosts and from other sites.

    Args:
        app: what is guarded.
        hosts: names that a request may be for, in lower case, without the port.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for key, value in HEADERS.items():
                    headers[key] = value
                headers.setdefault("Cache-Control", "no-store")
                headers["Date"] = formatdate(usegmt=True)
            await send(message)

        refusal = self._refusal(scope)
        answer = self._app if refusal is None else refusal
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        given = headers.getlist("host")
        host = host_name(given[0]) if len(given) == 1 else None
        if host not in self._hosts:
            # The name is not repeated: it is somebody else's text.
            return PlainTextResponse(
                "This page is not served under that name. If it should be, start it with "
                "annotate.page.hosts=[NAME].\n",
                status_code=421,
            )
        if scope["method"] not in SAFE_METHODS and not is_same_origin(headers, given[0]):
            return PlainTextResponse("A form of another site was refused.\n", status_code=403)
        return None


def host_name(host: str) -> str | None:
    """Return the name in a `Host` header, in lower case and without the port."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return None
    if parts.netloc != host or parts.username is not None or parts.hostname is None:
        return None
    return f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname


def is_same_origin(headers: Headers, host: str) -> bool:
    """Return whether a browser sent the request from our own page, or no browser sent it."""
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site", "same-origin") == "same-origin"
    parts = urlsplit(origin)
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()
