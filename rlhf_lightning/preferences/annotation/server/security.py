"""Protection of the page: hosts, origins, headers, signed cookies, CSRF and access tokens.

A foreign `Host` is what a browser sends when a foreign name was made to point here (DNS rebinding);
a foreign `Origin` is another site's form. Both are refused before anything is read.

The cookie `visit` is a random number that a browser keeps; the CSRF token of its forms is made
from it, so another site cannot know that token. `rater` says who signed in, in that browser. Both
are signed with a secret of the store and the access token: another token signs all raters out.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from email.utils import formatdate
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
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
        app: application to guard.
        hosts: names that a request may be for, in lower case, without the port.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
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
            # The name is not repeated: it is foreign text.
            return PlainTextResponse(
                "This page is not served under that name. If it should be, start it with "
                "page.hosts=[NAME].\n",
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


LASTS_SECONDS = 30 * 24 * 3600


@dataclass(frozen=True)
class Visitor:
    """A browser.

    Args:
        visit: random number of the browser.
        is_new: whether the number is new and the browser has to store it.
        rater_id: rater who signed in there, or None.
    """

    visit: str
    is_new: bool
    rater_id: int | None


class Identity:
    """Makes and checks cookies and CSRF tokens.

    Args:
        secret: secret of the store.
        token: the access token, or None.
        name: tells the cookies of two servers on one machine apart.
    """

    def __init__(self, secret: str, token: str | None, name: str) -> None:
        self._token = token
        self._key = hmac.digest(secret.encode(), f"key:{token or ''}".encode(), "sha256")
        self._visit, self._rater = f"visit_{name}", f"rater_{name}"

    @property
    def needs_token(self) -> bool:
        """True if raters are asked for a token."""
        return self._token is not None

    def visitor(self, request: Request) -> Visitor:
        """Return who is asking."""
        visit = request.cookies.get(self._visit, "")
        if not re.fullmatch("[0-9a-f]{32}", visit):
            return Visitor(secrets.token_hex(16), True, None)
        number, _, signature = request.cookies.get(self._rater, "").partition(".")
        expected = self._sign(f"rater:{visit}:{number}")
        known = number.isdecimal() and number.isascii() and _same(signature, expected)
        return Visitor(visit, False, int(number) if known else None)

    def csrf_token(self, visitor: Visitor) -> str:
        """Return the CSRF token of the forms of this browser."""
        return self._sign(f"form:{visitor.visit}")

    def is_csrf_token(self, visitor: Visitor, given: str) -> bool:
        """Return whether a form came from a page of ours in this browser."""
        return not visitor.is_new and _same(given, self.csrf_token(visitor))

    def is_token(self, given: str) -> bool:
        """Return whether this is the token, or none is needed."""
        return self._token is None or _same(given, self._token)

    def keep_visit(self, response: Response, visitor: Visitor, *, secure: bool) -> None:
        """Let the browser keep its number."""
        if visitor.is_new:
            self._set(response, self._visit, visitor.visit, secure)

    def sign_in(self, response: Response, visitor: Visitor, rater_id: int, *, secure: bool) -> None:
        """Let the browser say from now on that this rater asks."""
        signature = self._sign(f"rater:{visitor.visit}:{rater_id}")
        self._set(response, self._rater, f"{rater_id}.{signature}", secure)

    def sign_out(self, response: Response) -> None:
        """Let the browser forget the rater."""
        response.delete_cookie(self._rater, httponly=True, samesite="lax")

    def _set(self, response: Response, key: str, value: str, secure: bool) -> None:
        response.set_cookie(
            key, value, max_age=LASTS_SECONDS, httponly=True, samesite="lax", secure=secure
        )

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


def _same(given: str, expected: str) -> bool:
    # As bytes: compare_digest refuses text that is not ASCII.
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())
