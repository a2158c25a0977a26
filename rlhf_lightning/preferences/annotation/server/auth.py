"""Who is asking: signed cookies, the hidden word of our forms, and the access token.

`visit` is a random number that a browser keeps; the hidden word of its forms is made from it, so
another site cannot know that word. `rater` says who signed in, in that browser. Both are signed
with a secret of the store and the access token: another token signs everybody out.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

LASTS_SECONDS = 30 * 24 * 3600


@dataclass(frozen=True)
class Visitor:
    """A browser.

    Args:
        visit: its random number.
        is_new: whether it was drawn just now and has to be kept by the browser.
        rater_id: who signed in there, None if nobody.
    """

    visit: str
    is_new: bool
    rater_id: int | None


class Identity:
    """Makes and checks cookies and hidden words.

    Args:
        secret: of the store.
        token: the access token, or None.
        name: tells the cookies of two servers on one machine apart.
    """

    def __init__(self, secret: str, token: str | None, name: str) -> None:
        self._token = token
        self._key = hmac.digest(secret.encode(), f"key:{token or ''}".encode(), "sha256")
        self._visit, self._rater = f"visit_{name}", f"rater_{name}"

    @property
    def needs_token(self) -> bool:
        """Whether raters are asked for a token."""
        return self._token is not None

    def visitor(self, request: Request) -> Visitor:
        """Return who is asking."""
        visit = request.cookies.get(self._visit, "")
        if not _is_hex(visit):
            return Visitor(secrets.token_hex(16), True, None)
        number, _, signature = request.cookies.get(self._rater, "").partition(".")
        expected = self._sign(f"rater:{visit}:{number}")
        known = number.isdecimal() and number.isascii() and _same(signature, expected)
        return Visitor(visit, False, int(number) if known else None)

    def form_word(self, visitor: Visitor) -> str:
        """Return the hidden word of the forms of this browser."""
        return self._sign(f"form:{visitor.visit}")

    def is_own_form(self, visitor: Visitor, word: str) -> bool:
        """Return whether a form came from a page of ours in this browser."""
        return not visitor.is_new and _same(word, self.form_word(visitor))

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


def _is_hex(text: str) -> bool:
    return len(text) == 32 and all(c in "0123456789abcdef" for c in text)
