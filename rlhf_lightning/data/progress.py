"""Word of work that takes long. Imports nothing heavy: the labelling page reads files, too."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from rich import get_console
from rich.markup import escape
from rich.progress import Progress

FIRST_AFTER = 5.0  # seconds; each further line after twice as many

Item = TypeVar("Item")
logger = logging.getLogger(__name__)


def with_progress(
    items: Iterable[Item], what: str, total: int | None = None, unit: str = "rows"
) -> Iterator[Item]:
    """Yield the items; log their number after 5 seconds, after 10, 20, and so on.

    Args:
        items: items that take long to make.
        what: activity to log, such as `reading data.jsonl`.
        total: their number, where it is known.
        unit: name of one item, plural.
    """
    begun, wait = time.monotonic(), FIRST_AFTER
    first = (os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0") == "0"
    of = "" if total is None else f" of {total}"
    for number, item in enumerate(items):
        if time.monotonic() - begun > wait and first:
            logger.info("%s: %d%s %s after %.0f seconds", what, number, of, unit, wait)
            wait *= 2
        yield item


def with_bar(items: Sequence[Item], what: str, unit: str) -> Iterator[Item]:
    """Yield the items as `with_progress` does, and show a bar where people see a terminal."""
    with Progress(disable=not get_console().is_terminal) as bar:
        told = with_progress(items, what, len(items), unit)
        yield from bar.track(told, total=len(items), description=escape(what))
