"""Start measured processes alternately and gather their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Args:
        name: in the results.
        worker: module below `benchmarks.workers`.
        task: what it reads.
        python: interpreter whose packages it uses.
        environment: variables it needs beside the common ones.
    """

    name: str
    worker: str
    task: Mapping[str, Any]
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


def alternate(
    sides: Sequence[Side], repeats: int, *, lock: Path | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Run every side once, then every side again, `repeats` times; return what each run wrote.

    Args:
        sides: in the order in which they take turns.
        repeats: processes a side.
        lock: file that is held while a process runs, for machines that others measure on too.
    """
    runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for repeat in range(repeats):
        for side in sides:
            sys.stderr.write(f"[{repeat + 1}/{repeats}] {side.name}\n")
            runs[side.name].append(run(side, lock=lock))
    return runs


def run(side: Side, *, lock: Path | None = None) -> dict[str, Any]:
    """Run one process to its end and return what it wrote.

    Raises:
        RuntimeError: if it fails; the message ends with its last words.
    """
    with tempfile.TemporaryDirectory() as folder, held(lock):
        task_file, result_file = Path(folder, "task.json"), Path(folder, "result.json")
        task_file.write_text(json.dumps(side.task), encoding="utf-8")
        module = f"benchmarks.workers.{side.worker}"
        done = subprocess.run(
            [side.python, "-m", module, str(task_file), str(result_file)],
            cwd=ROOT,
            env={**environment(side.task["threads"]), **side.environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode or not result_file.exists():
            words = done.stderr[-3000:]
            raise RuntimeError(
                f"{side.name} ({module}) ended with status {done.returncode}:\n{words}"
            )
        result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
        return result


def environment(threads: int) -> dict[str, str]:
    """Return the environment of a measured process that uses `threads` threads."""
    common = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    # The same for every side: what `rlhf_lightning.train` sets for itself.
    spin = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "10000")}
    return {**os.environ, **common, **spin}


@contextmanager
def held(lock: Path | None) -> Iterator[None]:
    """Hold the lock of a machine on which others measure too, if there is one."""
    if lock is None:
        yield
        return
    import fcntl  # not on every system, and only needed here

    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
