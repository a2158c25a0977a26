"""Kill a run with SIGKILL at random instants, resume it, and hold it against one never killed.

A run is the real command line in processes of its own. Everything random comes from the seed of a
kill, but for the exact instant, which also depends on the machine.

Light on purpose: torch is imported where runs are compared, so that watching one costs little.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.resume import checkpoint_iteration, newest_complete_checkpoint
from tests.builders.command_lines import overrides_of
from tests.builders.ranks import ROOT, Outcome, run_ranks

SAVE_EVERY = 2
MOST_AHEAD = 4  # iterations from where a run continues to its next kill
PATIENCE = 500  # seconds for one start of a run
WALL_CLOCK = ("time/", "throughput/")
Moment = Literal["any", "save"]
# Adds 24 MiB to each checkpoint, so that a save takes a while and a kill can hit it; counts its
# callers, so that a callback that forgets its state would be seen.
BALLAST = """
import torch
from lightning.pytorch.callbacks import Callback

class Ballast(Callback):
    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, *_):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["ballast"] = torch.full((6 * 2**20,), float(self.batches))
"""
STAGES = {
    "sft": ["data.num_epochs=8", "trainer.validations=2", "callbacks.checkpoint.monitor=val/loss"],
    "reward": ["data.num_epochs=8", "trainer.validations=2", "module.dropout=0.1"],
    "dpo": ["data.num_epochs=8", "trainer.validations=2"],
    "kto": ["data.num_epochs=8", "trainer.validations=2"],
    "ppo": [
        "module.ppo.num_minibatches=2",
        "module.ppo.num_ppo_epochs=2",
        "module.ppo.kl_target=2.0",
        "module.ppo.kl_horizon=50",
        "callbacks.samples.every_n_iterations=1",
    ],
}
STRATEGIES = {
    "single": ["strategy=auto"],
    "ddp": ["strategy=ddp", "trainer.devices=2"],
    "fsdp": ["strategy=fsdp", "trainer.devices=2"],
}
SHARDED = {("sft", "fsdp"), ("ppo", "fsdp")}  # whose checkpoints every rank writes


class Case(NamedTuple):
    """A run and when it is killed: `save` waits for a checkpoint that is being written."""

    stage: str
    strategy: str
    kills: tuple[Moment, ...]

    @property
    def iterations(self) -> int:
        """Iterations of the run: room for its kills."""
        return 24 if len(self.kills) > 3 else 6

    def __str__(self) -> str:
        return f"{self.stage}-{self.strategy}"


class Runs:
    """Runs of one stage and strategy, each in a folder of its own.

    Args:
        folder: for all of them.
        start: model that they start from.
        case: which stage and strategy.
    """

    def __init__(self, folder: Path, start: Path, case: Case) -> None:
        self.folder = folder
        self.world_size = 1 if case.strategy == "single" else 2
        (folder / "ballast.py").write_text(BALLAST)
        whole = case.strategy == "fsdp" and case[:2] not in SHARDED
        kind = ["strategy.checkpoint=full"] if whole else []
        self.arguments = [
            *("-m", "rlhf_lightning.train", *overrides_of(case.stage, start)),
            *(*STAGES[case.stage], *STRATEGIES[case.strategy], *kind),
            f"data.batch_size={4 * self.world_size}",
            f"trainer.limit_train_batches={case.iterations}",
            "trainer.accelerator=cpu",
            f"callbacks.checkpoint.every_n_iterations={SAVE_EVERY}",
            "callbacks.checkpoint.keep_last=2",
            "+callbacks.extra.ballast._target_=ballast.Ballast",
            "artifacts.reward=null",
            "resume=auto",
        ]

    def start(self, name: str, interfere: Any = None) -> Outcome:
        """Start all processes of a run; it continues what is unfinished."""
        where = self.folder / name
        where.mkdir(exist_ok=True)
        logs = self.folder / f"{name}_{sum(1 for _ in self.folder.glob(f'{name}_*'))}"
        path = os.pathsep.join(map(str, (self.folder, ROOT)))
        return run_ranks(
            [*self.arguments, f"paths.outputs={where}/outputs", f"paths.artifacts={where}/made"],
            world_size=self.world_size,
            folder=logs,
            timeout=PATIENCE,
            environment={"PYTHONPATH": path, "RLHF_ALLOWED_TARGETS": "ballast."},
            working_folder=where,
            interfere=interfere,
        )


class Killer:
    """Kills one rank or all of them, at an instant drawn from the seed.

    Args:
        outputs: of the run.
        moment: when.
        iterations: of the run.
        seed: of the instant and of who is killed.
    """

    def __init__(self, outputs: Path, moment: Moment, iterations: int, seed: str) -> None:
        self.outputs = outputs
        self.iterations = iterations
        self.random = random.Random(seed)
        self.done = resumes_at(outputs)
        self.saving = moment == "save" and self.done < iterations
        self.struck = ""  # when, in words; empty if the run was faster

    def __call__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        """Wait for the instant, then kill."""
        started = time.time_ns()
        last = min(self.iterations + (not self.saving), self.done + MOST_AHEAD)
        rows = self.random.randrange(self.done, last)
        # Near the end a rank other than the first may have nothing left to do.
        several = range(len(processes) if rows < self.iterations - 1 else 1)
        victim = self.random.choice([None, *several])
        deadline = time.monotonic() + PATIENCE
        while not self._come(rows, started):
            if processes[0].poll() is not None or time.monotonic() > deadline:
                return
            time.sleep(0.001)
        # An iteration takes some 0.1 s, a save 0.05 s, what follows training a second.
        longest = 0.04 if self.saving else 0.25 if rows < self.iterations else 1.0
        time.sleep(self.random.uniform(0, longest))
        for rank, process in enumerate(processes):
            if victim in (None, rank) and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                self.struck = f"rank {'all' if victim is None else victim}"
        if not self.struck:
            return
        halves = [path.name for path in self._unfinished(started)]
        self.struck += f", after {self._rows(started)} of {self.iterations} iterations"
        self.struck += f", writing {halves[0]}" if halves else ""

    def _come(self, rows: int, started: int) -> bool:
        if self.saving:
            return bool(self._unfinished(started)) and self._rows(started) > rows
        begun = self._fresh("summary.json", started)
        return bool(begun) and (rows == self.done or self._rows(started) >= rows)

    def _rows(self, started: int) -> int:
        tables = self._fresh("metrics.csv", started)
        return max((len(read_metrics(path)) for path in tables), default=self.done)

    def _unfinished(self, started: int) -> list[Path]:
        return self._fresh("checkpoints/.iteration*tmp*", started)

    def _fresh(self, name: str, started: int) -> list[Path]:
        """Return the files of the run of that name that were written since this start."""
        found = []
        for path in self.outputs.glob(f"*/*/{name}"):
            try:
                found += [path] if path.stat().st_mtime_ns > started else []
            except FileNotFoundError:  # renamed by now
                continue
        return found


def resumes_at(outputs: Path) -> int:
    """Return the iteration from which the run below `outputs` would continue; 0 for none."""
    folders = [RunFolder(path.parent) for path in outputs.glob("*/*/summary.json")]
    found = [newest_complete_checkpoint(folder) for folder in folders]
    return max((checkpoint_iteration(path) or 0 for path in found if path), default=0)


def finished(where: Path) -> list[Path]:
    """Return the runs below `where` that completed: none, or one."""
    summaries = list(where.glob("outputs/*/*/summary.json"))
    done = [p.parent for p in summaries if json.loads(p.read_text())["status"] == "completed"]
    assert len(done) <= 1, done
    return done


def differences(one: Path, other: Path, iterations: int) -> list[str]:
    """Return what differs between two runs: weights, optimizer, loops, samples, metrics."""
    found = list(_table_differences(one, other, iterations))
    states = [read_checkpoint(_last(run, iterations)) for run in (one, other)]
    found += different(*states)
    if any((run / "samples.jsonl").exists() for run in (one, other)):
        texts = [(run / "samples.jsonl").read_bytes() for run in (one, other)]
        found += ["samples.jsonl"] if texts[0] != texts[1] else []
    summaries = [json.loads((run / "summary.json").read_text())["metrics"] for run in (one, other)]
    found += ["summary.json"] if summaries[0] != summaries[1] else []
    exported = [sorted((run / "export").glob("*.safetensors")) for run in (one, other)]
    assert exported[0]
    pairs = zip(*exported, strict=True)
    return found + [str(a.name) for a, b in pairs if a.read_bytes() != b.read_bytes()]


def _table_differences(one: Path, other: Path, iterations: int) -> Iterator[str]:
    tables = [read_metrics(run / "metrics.csv") for run in (one, other)]
    for run, table in zip((one, other), tables, strict=True):
        if [int(row["iteration"]) for row in table] != list(range(1, iterations + 1)):
            yield f"{run.name}/metrics.csv: iterations {[int(row['iteration']) for row in table]}"
            return
    for a, b in zip(*tables, strict=True):
        names = {name for name in {*a, *b} if not name.startswith(WALL_CLOCK)}
        yield from (f"{n} at {int(a['iteration'])}" for n in names if a.get(n) != b.get(n))


def _last(run: Path, iterations: int) -> Path:
    path = (run / "checkpoints" / "last.ckpt").resolve()
    assert checkpoint_iteration(path) == iterations, path
    return path


def read_checkpoint(checkpoint: Path) -> Any:
    import torch

    from rlhf_lightning.distributed.checkpoint import read_full

    whole = not checkpoint.is_dir()
    return torch.load(checkpoint, weights_only=True) if whole else read_full(checkpoint)


def different(one: Any, other: Any) -> list[str]:
    """Return the paths at which two states differ."""
    return [path for path, a, b in _leaves(one, other) if not _equal(a, b)]


def _leaves(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**one, **other}:
            yield from _leaves(one.get(key), other.get(key), f"{path}/{key}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            yield path, len(one), len(other)
        for index, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from _leaves(a, b, f"{path}/{index}")
    else:
        yield path, one, other


def _equal(a: Any, b: Any) -> bool:
    import torch

    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    return bool(a == b) or (a != a and b != b)
