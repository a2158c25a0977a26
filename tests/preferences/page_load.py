"""Raters who label as fast as the page answers, each a process of its own, over HTTP.

python -m tests.preferences.page_load --labels 20000 --raters 8
"""

from __future__ import annotations

import argparse
import html
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

from rlhf_lightning.preferences.annotation.store import LabelStore
from tests.builders.labels import make_pairs
from tests.preferences.invariants import check_store, most_labels
from tests.preferences.page_server import Client, serving

TEXTS = re.compile(r'<div class="free[^"]*" dir="auto">(.*?)</div>', re.DOTALL)


@dataclass(frozen=True)
class Load:
    """What a run showed; times in milliseconds.

    Args:
        labels: confirmed by the server.
        lost: of these, how many the store does not have, or has with another choice.
        unasked: labels in the store that nobody gave.
        most: labels of one pair, at most.
        answered_median: from sending an answer to its confirmation, which is the next pair.
        answered_p95: the same, for 95 of 100.
        labels_per_second: of all raters together.
    """

    labels: int
    lost: int
    unasked: int
    most: int
    answered_median: float
    answered_p95: float
    labels_per_second: float


@dataclass
class Session:
    """What one rater was shown and chose, and how long it took."""

    name: str
    given: list[tuple[str, str]]  # question, text of the better answer
    seconds: list[float]


def run_load(folder: Path, *, num_pairs: int, ratings_per_pair: int, num_raters: int) -> Load:
    """Let raters label all pairs, and compare what they were told with what is in the store."""
    ratings = f"ratings_per_pair={ratings_per_pair}"
    with serving(folder, make_pairs(num_pairs), ratings) as server:
        tasks = [(server.url, f"rater {number}") for number in range(num_raters)]
        started = time.perf_counter()
        with multiprocessing.get_context("spawn").Pool(num_raters) as pool:
            sessions = pool.starmap(rate, tasks, chunksize=1)
        seconds = time.perf_counter() - started
        server.kill()  # what was confirmed is on the disk already
        store = server.store
    check_store(store)
    told = Counter((s.name, *given) for s in sessions for given in s.given)
    kept = Counter(stored(store))
    took = [1000 * t for s in sessions for t in s.seconds]
    return Load(
        labels=told.total(),
        lost=(told - kept).total(),
        unasked=(kept - told).total(),
        most=most_labels(store),
        answered_median=round(median(took), 1),
        answered_p95=round(quantiles(took, n=20)[-1], 1),
        labels_per_second=round(told.total() / seconds, 1),
    )


def rate(url: str, name: str) -> Session:
    """Label until nothing is left: now the left answer, now the right one."""
    client = Client(url)
    session = Session(name, [], [])
    page = client.sign_in(name).text
    while (texts := TEXTS.findall(page)) and len(texts) == 3:
        question, left, right = map(html.unescape, texts)
        is_left = len(session.given) % 3 > 0
        started = time.perf_counter()
        following = client.answer_at_once(page, "left" if is_left else "right")
        session.seconds.append(time.perf_counter() - started)
        session.given.append((question, left if is_left else right))
        page = following.text
    client.close()
    return session


def stored(path: Path) -> list[tuple[str, str, str]]:
    """Return rater, question and better answer of every label in the store."""
    with LabelStore(path) as store:
        pairs = {pair.pair_id: pair for pair in store.pairs()}
        found = []
        for label in store.labels():
            pair = pairs[label.pair_id]
            better = {"first": pair.first, "second": pair.second}[label.choice]
            found.append((label.annotator, str(pair.prompt), better))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--labels", type=int, default=20_000)
    parser.add_argument("--raters", type=int, default=8)
    parser.add_argument("--ratings-per-pair", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        load = run_load(
            Path(folder),
            num_pairs=arguments.labels // arguments.ratings_per_pair,
            ratings_per_pair=arguments.ratings_per_pair,
            num_raters=arguments.raters,
        )
    sys.stdout.write(json.dumps(asdict(load), indent=2) + "\n")


if __name__ == "__main__":
    main()
