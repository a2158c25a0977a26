"""A profile of iterations: a table and a trace in the run folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.profiler import ProfilerActivity, profile

from rlhf_lightning.arguments import Count, CountOrZero, checked
from rlhf_lightning.callbacks.iterations import current_iteration, fresh_metrics
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.metric_catalog import counted

NUM_OPERATORS = 25


class ProfileIterations(Callback):
    """Profile a few iterations of the first process with `torch.profiler`.

    It writes `profile/table.txt` (phases, then operators by their own time) and
    `profile/trace.json.gz`, which https://ui.perfetto.dev and chrome://tracing open. Profiling
    makes an iteration slower, a small model's most of all: read shares, not seconds.

    Args:
        skip: first iterations, which are not profiled: they warm up kernels and caches.
        num_iterations: number of profiled iterations.

    Raises:
        ValueError: for a number out of range.
    """

    @checked
    def __init__(self, *, skip: CountOrZero = 2, num_iterations: Count = 2) -> None:
        self.skip = skip
        self.num_iterations = num_iterations
        self._profiler: profile | None = None
        self._phases: dict[str, float] = {}
        self._seen = 0

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Start when enough iterations have passed."""
        if not trainer.is_global_zero or self._seen:
            return
        if current_iteration(trainer) > self.skip:
            gpu = [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu], acc_events=True)
            self._profiler.start()
            self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Count, and write after the last iteration."""
        if self._profiler is None:
            return
        self._seen += 1
        for name, value in fresh_metrics(trainer).items():
            if name.startswith("time/"):
                self._phases[name] = self._phases.get(name, 0.0) + value
        if self._seen == self.num_iterations:
            self._stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what there is of a run that was shorter, and say so where there is nothing."""
        if self._profiler is not None:
            self._stop(trainer)
        elif trainer.is_global_zero and not self._seen:
            rank_zero_info(f"nothing was profiled: the run ended within {self.skip} iterations")

    def on_exception(self, *_: Any) -> None:
        """Let the profiler go."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _stop(self, trainer: Trainer) -> None:
        assert self._profiler is not None
        seconds = time.perf_counter() - self._started
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        folder = RunFolder(Path(trainer.default_root_dir)).profile
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / "trace.json.gz"))
        averages = profiler.key_averages()
        sort = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        operators = averages.table(sort_by=sort, row_limit=NUM_OPERATORS, max_name_column_width=48)
        write_text(folder / "table.txt", f"{self._phase_table(seconds)}\n{operators}\n")

    def _phase_table(self, whole: float) -> str:
        """Return seconds and shares of the phases that the module times, and of the rest."""
        lines = [f"{counted(self._seen, 'iteration')} profiled, {whole:.2f} s", ""]
        phases = sorted(self._phases.items(), key=lambda item: -item[1])
        rest = whole - sum(self._phases.values())
        for name, seconds in [*phases, ("everything else", max(rest, 0.0))]:
            lines.append(f"{name:18} {seconds:8.2f} s  {seconds / whole:6.1%}")
        return "\n".join(lines) + "\n"
