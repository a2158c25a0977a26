"""Differences, faults and memory of two runs that must end alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.studies.endurance.memory_log import growth, read_memory
from benchmarks.studies.endurance.run import Endurance
from rlhf_lightning.runs.folder import read_metrics
from rlhf_lightning.runs.resume import newest_complete_checkpoint
from rlhf_lightning.runs.summary import read_summary

NOT_COMPARED = ("time/", "throughput/")  # the clock
WARM_UP, WINDOW = 100, 50


def differences(steady: Endurance, killed: Endurance) -> list[str]:
    """List what of the killed run is not, bit for bit, what it is in the steady one."""
    found = []
    runs = (steady, killed)
    for run in runs:
        counted = [int(row["iteration"]) for row in read_metrics(run.run_folder.metrics)]
        if counted != list(range(1, run.num_iterations + 1)):
            found.append(f"{run.folder.name}: the iterations of metrics.csv are {counted}")
        if read_summary(run.run_folder).status != "completed":
            found.append(f"{run.folder.name}: {read_summary(run.run_folder).status}")
    one, other = (list(map(repr, map(_measured, _rows(run)))) for run in runs)
    rows = enumerate(zip(one, other, strict=False), start=1)
    found += [f"metrics of iteration {i}: {a}, {b}" for i, (a, b) in rows if a != b]
    if steady.run_folder.samples.read_bytes() != killed.run_folder.samples.read_bytes():
        found.append("samples.jsonl differs")
    if read_summary(steady.run_folder).metrics != read_summary(killed.run_folder).metrics:
        found.append("the final metrics differ")
    states = [dict(_values(_checkpoint(run))) for run in runs]
    for name in sorted(set(states[0]) | set(states[1])):
        if not _same(states[0].get(name), states[1].get(name)):
            found.append(f"checkpoint: {name}")
    return found


def _rows(run: Endurance) -> list[dict[str, float]]:
    return read_metrics(run.run_folder.metrics)


def _measured(row: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in sorted(row.items()) if not k.startswith(NOT_COMPARED)}


def _checkpoint(run: Endurance) -> Any:
    path = newest_complete_checkpoint(run.run_folder)
    assert path is not None
    content = torch.load(path, weights_only=True)
    return {
        key: content[key] for key in ("state_dict", "optimizer_states", "rng") if key in content
    }


def _values(node: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _values(value, f"{where}/{key}")
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _values(value, f"{where}/{index}")
    else:
        yield where, node


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and one == other


def memory_growth(run: Endurance) -> float:
    """Return the share by which the longest process's memory grew after its warm-up."""
    rows = read_memory(run.memory)
    (longest, _), *_ = Counter(pid for pid, _, _ in rows).most_common(1)
    return growth([row for row in rows if row[0] == longest], warm_up=WARM_UP, window=WINDOW)


def report(steady: Endurance, killed: Endurance) -> str:
    """Return iterations, faults, memory and differences of both runs in a few lines."""
    lines = []
    for run in (steady, killed):
        state, rows = run.state, read_memory(run.memory)
        skipped = sum(row.get("ppo/skipped_steps", 0) for row in _rows(run))
        sizes = [size for _, _, size in rows]
        lines.append(
            f"{run.folder.name}: {run.num_iterations} iterations in {state['seconds']} s and "
            f"{state['starts']} starts ({len(rows)} iterations computed), {state['faults']} faults "
            f"of the process, {skipped:.0f} skipped rollouts, answers of the service "
            f"{state['given']}, resident memory {min(sizes) / 2**20:.0f} to "
            f"{max(sizes) / 2**20:.0f} MiB"
        )
    if steady.num_iterations >= WARM_UP + 2 * WINDOW:
        lines.append(f"memory of steady after {WARM_UP} iterations: {memory_growth(steady):+.2%}")
    different = differences(steady, killed)
    lines.append("different: " + ("; ".join(different) if different else "nothing"))
    return "\n".join(lines) + "\ndone\n"


def passed_over(folder: Path) -> int:
    """Return the number of damaged checkpoints that the log of a run names."""
    return (folder / "log.txt").read_text(errors="replace").count("passing over a checkpoint")
