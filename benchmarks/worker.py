"""Main function of a measured process: read its task, run it, write figures and memory."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Task = dict[str, Any]


def memory_bytes(field: str) -> int:
    """Return a memory figure of this process, such as VmRSS (resident now) or VmHWM (its peak).

    Raises:
        RuntimeError: where there is no /proc: these figures exist on Linux alone.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        raise RuntimeError("resident memory is read from /proc/self/status: run this on Linux")
    for line in status.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def seconds_of_process() -> float:
    """Return how long ago this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def reset_peak() -> None:
    """Let VmHWM count from now on."""
    Path("/proc/self/clear_refs").write_text("5")


class Stopwatch:
    """Marks of wall and processor time, on CUDA after everything before it has run.

    Args:
        device: "cpu" or "cuda".
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.marks: list[tuple[float, float]] = []

    def now(self) -> float:
        """Return the wall time, seconds."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def mark(self) -> None:
        """Note wall and processor time."""
        self.marks.append((self.now(), time.process_time()))

    def laps(self) -> list[dict[str, float]]:
        """Return wall seconds and processor seconds between marks."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [{"seconds": b[0] - a[0], "cpu_seconds": b[1] - a[1]} for a, b in pairs]


class StepCounter:
    """Counts the steps that a torch optimizer really takes."""

    def __init__(self) -> None:
        self.count = 0

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Count every step of `optimizer` from now on."""
        optimizer.register_step_post_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1


def worker_main(run: Callable[[Task], dict[str, Any]]) -> None:
    """Run `run` on the task in the file argv[1] and write what it returns to argv[2].

    Memory is that of the process: after its imports, and its peak to the end of what is measured;
    on CUDA also the peak of what torch has allocated there.
    """
    after_imports = memory_bytes("VmRSS")
    load = os.getloadavg()[0]
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(task["threads"])
    result = run(task)
    result["memory"] = {
        "after_imports": after_imports,
        "peak": result.pop("peak", None) or memory_bytes("VmHWM"),
    }
    if torch.cuda.is_available() and task["device"] == "cuda":
        result["memory"]["peak_device"] = torch.cuda.max_memory_allocated()
    result |= {"load_average_at_start": load, "threads": task["threads"]}
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
