"""Raters at the labelling page while its server is killed and started again.

python -m tests.preferences.page_kills --raters 50 --seconds 60 --kills 2
"""

from __future__ import annotations

import argparse
import html
import http.client
import json
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.builders.labels import make_pairs
from tests.builders.ranks import free_port
from tests.preferences.invariants import check_store, most_labels
from tests.preferences.page_load import TEXTS, stored
from tests.preferences.page_server import Client, serving

RATINGS = 2
PROCESSES = 5  # that share the raters
Given = tuple[str, str]  # question, text of the better answer


@dataclass(frozen=True)
class Survival:
    """What a page that was killed kept.

    Args:
        confirmed: labels that the page said it had kept.
        lost: of these, how many the store does not have.
        unconfirmed: labels in the store whose confirmation a kill cut off.
        unasked: labels in the store that nobody gave.
        most: labels of one pair, at most.
        broken: requests that a kill or a pause cut off.
    """

    confirmed: int
    lost: int
    unconfirmed: int
    unasked: int
    most: int
    broken: int


@dataclass
class Session:
    """What one rater gave, and what they sent without hearing of it."""

    name: str
    given: list[Given] = field(default_factory=list)
    unsure: list[Given] = field(default_factory=list)
    broken: int = 0


def run_kills(folder: Path, *, num_raters: int, seconds: float, kills: int) -> Survival:
    """Let raters label for some seconds, and kill the server `kills` times meanwhile."""
    port, ratings = free_port(), f"ratings_per_pair={RATINGS}"
    pairs, end = make_pairs(int(num_raters * seconds * 8)), 0.0
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        for number in range(kills + 1):
            with serving(folder, pairs if number == 0 else (), ratings, port=port) as server:
                if number == 0:
                    end = time.time() + seconds
                    tasks = [(server.url, f"rater {n}", end) for n in range(num_raters)]
                    parts = [tasks[n::PROCESSES] for n in range(PROCESSES)]
                    found = pool.map_async(_rate_together, parts, chunksize=1)
                left = end - time.time()
                if number == kills:
                    sessions = [s for part in found.get(left + 60) for s in part]
                else:
                    time.sleep(left / (kills - number + 1))
                server.kill()
    check_store(server.store)
    told = Counter((s.name, *given) for s in sessions for given in s.given)
    unsure = Counter((s.name, *given) for s in sessions for given in s.unsure)
    kept = Counter(stored(server.store))
    return Survival(
        confirmed=told.total(),
        lost=(told - kept).total(),
        unconfirmed=((kept - told) & unsure).total(),
        unasked=(kept - told - unsure).total(),
        most=most_labels(server.store),
        broken=sum(s.broken for s in sessions),
    )


def _rate_together(tasks: list[tuple[str, str, float]]) -> list[Session]:
    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(lambda task: _rate(*task), tasks))


def _rate(url: str, name: str, end: float) -> Session:
    """Label until the end: now the left answer, now the right one; sign in again after a kill."""
    session, client, page = Session(name), Client(url), ""
    while time.time() < end:
        sent: Given | None = None
        try:
            page = page or client.sign_in(name).text
            question, left, right = map(html.unescape, TEXTS.findall(page))
            is_left = len(session.given) % 3 > 0
            sent = question, left if is_left else right
            page = client.answer_at_once(page, "left" if is_left else "right").text
            session.given.append(sent)
        except (OSError, http.client.HTTPException):
            session.broken += 1
            session.unsure += [sent] if sent else []
            client.close()
            client, page = Client(url), ""
            time.sleep(0.2)
    client.close()
    return session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--raters", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--kills", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        survival = run_kills(
            Path(folder), num_raters=given.raters, seconds=given.seconds, kills=given.kills
        )
    sys.stdout.write(json.dumps(asdict(survival), indent=2) + "\n")


if __name__ == "__main__":
    main()
