"""A way of computing that a context manager chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Way:
    """The way that holds now in this process: "auto", but inside of `chosen_by`.

    Args:
        key: the setting that chooses it, for messages.
        others: ways beside "auto".
    """

    def __init__(self, key: str, *others: str) -> None:
        self.key, self.known = key, ("auto", *others)
        self.name = "auto"

    @contextmanager
    def chosen_by(self, name: str) -> Iterator[None]:
        """Let the way `name` hold inside.

        Raises:
            ValueError: for another one.
        """
        if name not in self.known:
            raise ValueError(f"{self.key}={name!r}: use {', '.join(self.known)}")
        before, self.name = self.name, name
        try:
            yield
        finally:
            self.name = before
