"""The rate at which this machine copies memory, bytes read and written."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.worker import Stopwatch, Task, worker_main


def run(task: Task) -> dict[str, Any]:
    """Return bytes per second of copying a block that fits no cache."""
    watch = Stopwatch(task["device"])
    source = torch.ones(task["megabytes"] << 18, device=task["device"])  # fp32
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        started = watch.now()
        target.copy_(source)
        times.append(watch.now() - started)
    return {"bytes_per_second": 2 * source.nbytes / statistics.median(times[2:])}


if __name__ == "__main__":
    worker_main(run)
