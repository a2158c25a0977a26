"""Word of loading that takes long."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from lightning.pytorch.utilities.rank_zero import rank_zero_only

FIRST_AFTER = 5.0  # seconds; each further line after twice as many

Item = TypeVar("Item")
logger = logging.getLogger(__name__)


def told(items: Iterable[Item], what: str, total: int | None = None) -> Iterator[Item]:
    """Yield the items; log how many it were after 5 seconds, after 10, 20, and so on.

    Args:
        items: that take their time.
        what: is done, such as `reading data.jsonl`.
        total: their number, where it is known.
    """
    begun, wait = time.monotonic(), FIRST_AFTER
    of = "" if total is None else f" of {total}"
    for number, item in enumerate(items):
        if time.monotonic() - begun > wait and getattr(rank_zero_only, "rank", 0) == 0:
            logger.info("%s: %d%s rows after %.0f seconds", what, number, of, wait)
            wait *= 2
        yield item
