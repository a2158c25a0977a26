"""Collections that are killed ten times in all, seven of them in a write, and resumed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.builders.processes import ForkedPython
from tests.entry.test_collect import DECIDED, command, labels, runs

WRITTEN = ("candidates.jsonl", "pairs.jsonl", "data/train.jsonl", "data/validation.jsonl")
MOMENTS = ("grows", "any", "replaces", "grows", "any", "replaces", "grows", "replaces", "grows") * 3
KILLS = 10


def begin(folder: Path, start: Path, *more: str) -> ForkedPython:
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    words = command(start, *DECIDED, *more)[1:]
    return ForkedPython(words, folder, environment, folder / "log")


def is_killed(process: ForkedPython, folder: Path, moment: str, seed: int) -> bool:
    """Kill a collection, in a write or at any time; return whether it had begun and not ended."""
    first = sizes(folder)
    patience = time.monotonic() + random.Random(seed).uniform(0, 1) if moment == "any" else None
    while process.poll() is None:
        now = sizes(folder)
        if not any(name.endswith("summary.json") for name in now):
            continue
        if moment == "any" and patience is not None and time.monotonic() < patience:
            continue
        grown = any(n.endswith(".journal.jsonl") and s > first.get(n, 0) for n, s in now.items())
        half = any(".tmp-" in name and "summary" not in name for name in now)
        if {"any": True, "grows": grown, "replaces": half}[moment]:
            break
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def sizes(folder: Path) -> dict[str, int]:
    found = {}
    for top, _, names in os.walk(folder / "outputs"):
        for name in names:
            try:
                found[f"{top}/{name}"] = os.path.getsize(f"{top}/{name}")
            except FileNotFoundError:  # it has its own name by now
                continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_collection_that_is_killed_at_any_instant_is_the_one_never_killed(tmp_path, start):
    whole = tmp_path / "whole"
    assert begin(whole, start).wait() == 0, (whole / "log").read_text()[-2000:]
    moments, kills, number = list(MOMENTS), 0, 0
    while kills < KILLS:
        number += 1
        killed = tmp_path / f"killed_{number}"
        before = kills
        while kills < KILLS and moments:
            process = begin(killed, start, *(["resume=auto"] if kills > before else []))
            if not is_killed(process, killed, moments.pop(0), seed=len(moments)):
                time.sleep(1)  # it has ended, and the next one is named by another second
                break
            kills += list(killed.glob("outputs/collect/*/summary.json")) != []
        assert moments, f"only {kills} kills met a collection under way"
        last = begin(killed, start, "resume=auto")
        assert last.wait() == 0, (killed / "log").read_text()[-2000:]
        assert differences(whole, killed) == []


def differences(whole: Path, killed: Path) -> list[str]:
    """Return in what a collection that was killed differs from one that never was."""
    other, own = runs(whole)[-1], runs(killed)[0]
    found = [name for name in WRITTEN if (own / name).read_bytes() != (other / name).read_bytes()]
    found += ["labels"] if labels(own) != labels(other) else []
    metrics = [json.loads((run / "summary.json").read_text())["metrics"] for run in (own, other)]
    found += [] if metrics[0] == metrics[1] else ["metrics"]
    published = (f / "artifacts/demo_seed1/preferences" for f in (killed, whole))
    mine, theirs = ({p.name: p.read_bytes() for p in f.iterdir()} for f in published)
    found += [] if mine == theirs else ["published"]
    return found + [str(path) for path in own.rglob(".*.tmp-*")]
