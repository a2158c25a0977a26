"""Settings of the page: its address, its access and its texts."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlhf_lightning.hparams import Checked
from rlhf_lightning.text.thoughts import Thoughts

SHORTEST_TOKEN = 16
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
NEW_TOKEN = 'python -c "import secrets; print(secrets.token_urlsafe())"'


@dataclass(frozen=True)
class PageSettings(Checked):
    """Settings of the page.

    Args:
        host: address that is listened on. Any but this machine's own needs a token.
        port: 0 takes a free one.
        hosts: further names under which raters reach the page, with commas between them; a request
            for another name is refused.
        token: what raters are asked for; None asks for nothing.
        title: the question above the pairs.
        instructions: what raters are to look at; shown before they begin and while they work.
        thoughts: whether raters read the thoughts of responses that think.

    Raises:
        ValueError: if others could come without a token, or no rater could come at all.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    hosts: str = ""
    token: str | None = None
    title: str = "Which answer is better?"
    instructions: str = ""
    thoughts: Thoughts = "drop"

    def __post_init__(self) -> None:
        """Check the values; the token itself is never told."""
        super().__post_init__()
        object.__setattr__(self, "token", self.token or None)
        if self.token is None and not self.is_private:
            raise ValueError(
                f"host={self.host} and hosts={self.hosts or 'none'} let other "
                f"machines in, which needs a token: set RLHF_ANNOTATE_TOKEN, e.g. to what "
                f"{NEW_TOKEN} prints, or use host=127.0.0.1"
            )
        if self.token is not None and len(self.token) < SHORTEST_TOKEN:
            raise ValueError(
                f"token has {len(self.token)} characters, which can be guessed: use at "
                f"least {SHORTEST_TOKEN}, e.g. what {NEW_TOKEN} prints"
            )
        if self._address is not None and self._address.is_unspecified and not self._names:
            raise ValueError(
                f"host={self.host} is no host name: set hosts=[...] to the names or addresses that "
                "raters type into their browsers"
            )

    @property
    def is_private(self) -> bool:
        """True if the page lets in this machine alone."""
        return self._is_loopback and self._names <= LOOPBACK

    @property
    def allowed_hosts(self) -> frozenset[str]:
        """Names that a request may be for, in lower case, without the port."""
        own = _as_name(self.host.lower())
        unspecified = self._address is not None and self._address.is_unspecified
        local = LOOPBACK if unspecified or self._is_loopback else frozenset()
        return self._names | local | (frozenset() if unspecified else {own})

    @property
    def _is_loopback(self) -> bool:
        local = self._address is not None and self._address.is_loopback
        return local or self.host.lower() == "localhost"

    @property
    def _address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def _names(self) -> frozenset[str]:
        return frozenset(_as_name(n.strip().lower()) for n in self.hosts.split(",") if n.strip())


def _as_name(host: str) -> str:
    """Return an address as a browser's address bar shows it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
