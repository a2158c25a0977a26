"""A reward service with faults: unavailable, busy, slow, cut off, non-finite scores."""

from __future__ import annotations

import hashlib
import random
import threading
from collections import Counter
from typing import Any

from tests.builders.reward_server import failing, hanging_up, slow

TIMEOUT = 0.5
WANTED_LENGTH = 12
OVERFLOWS = 1e30  # its square is no float, so that the rollout is not finite
ONE_IN = 60  # answers that are given such a score


def score(prompt: str, completion: str) -> float:
    """Answers of a dozen characters are best; one text in `ONE_IN` breaks its rollout."""
    digest = hashlib.sha256(f"{prompt}\n{completion}".encode()).digest()
    if int.from_bytes(digest[:4], "big") % ONE_IN == 0:
        return OVERFLOWS
    return -abs(len(completion) - WANTED_LENGTH) / 4


def scores(body: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to a request of the scorer."""
    pairs = zip(body["prompts"], body["completions"], strict=True)
    return {"scores": [score(prompt, completion) for prompt, completion in pairs]}


class Unreliable:
    """The behaviour of a service for `tests.builders.reward_server`.

    Scores are a function of the texts, so that a run that asks again, or is resumed, learns the
    same. `given` counts the answers of each kind.

    Args:
        seed: of the faults.
    """

    def __init__(self, seed: int) -> None:
        self.given: Counter[str] = Counter()
        self.is_broken = False  # replies with NaN until it is set to False
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def __call__(self, body: dict[str, Any]) -> Any:
        """Return the next reply, or the next fault."""
        with self._lock:
            draw = self._random.random()
            kind = "broken" if self.is_broken else _kind(draw)
            self.given[kind] += 1
        if kind == "broken":
            return {"scores": [float("nan")] * len(body["prompts"])}
        if kind == "unavailable":
            return failing(503)(body)
        if kind == "busy":
            return failing(429, Retry_After="0")(body)
        if kind == "slow":
            return slow(2 * TIMEOUT, scores)(body)
        if kind == "cut off":
            return hanging_up(body)
        return scores(body)


def _kind(draw: float) -> str:
    for share, kind in ((0.04, "unavailable"), (0.08, "busy"), (0.10, "slow"), (0.12, "cut off")):
        if draw < share:
            return kind
    return "scored"
