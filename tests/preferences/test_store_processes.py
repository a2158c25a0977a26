"""Several processes on one store, and processes that are killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_lightning.preferences.annotation.store import LabelStore
from tests.builders.labels import make_pairs
from tests.preferences.invariants import check_store, most_labels

RATER = Path(__file__).with_name("labelling_process.py")


def start(store: Path, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(RATER), str(store), name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.timeout(90)
def test_processes_that_label_at_once_never_exceed_the_ratings_and_lose_nothing(tmp_path: Path):
    path = tmp_path / "labels.sqlite"
    with LabelStore(path) as store:
        store.add_pairs(make_pairs(60), ratings_per_pair=2)
    raters = [start(path, f"rater {n}") for n in range(3)]
    told = [process.communicate(timeout=80)[0].split() for process in raters]
    assert [process.returncode for process in raters] == [0, 0, 0]
    assert sum(map(len, told)) == 120
    assert most_labels(path) == 2
    with LabelStore(path) as store:
        kept = {(label.annotator, label.pair_id) for label in store.labels()}
    assert kept == {(f"rater {n}", pair) for n, pairs in enumerate(told) for pair in pairs}
    check_store(path)


@pytest.mark.timeout(90)
def test_a_killed_process_loses_no_label_that_it_told_of(tmp_path: Path):
    path = tmp_path / "labels.sqlite"
    with LabelStore(path) as store:
        store.add_pairs(make_pairs(500), ratings_per_pair=1)
    told: list[str] = []
    for number in (1, 7, 20):
        process = start(path, "Ann")
        assert process.stdout is not None
        told += [process.stdout.readline().strip() for _ in range(number)]
        process.send_signal(signal.SIGKILL)
        told += process.communicate()[0].split()
        with LabelStore(path) as store:
            kept = [label.pair_id for label in store.labels()]
        assert set(told) <= set(kept)
        # One may have been committed and not yet told.
        assert len(kept) - len(told) in (0, 1)
        told = kept
        check_store(path)
    assert len(told) == len(set(told)) >= 28
