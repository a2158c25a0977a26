"""PPO iterations of this project: the real PPOModule in a real Trainer."""

from __future__ import annotations

import benchmarks.as_trained  # noqa: F401  (before torch loads)

# isort: split

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from benchmarks.configured import PRECISIONS, bare_trainer, training_settings
from benchmarks.shapes import PAD, Workload
from benchmarks.shapes import prompts as prompt_rows
from benchmarks.worker import (
    StepCounter,
    Stopwatch,
    Task,
    memory_bytes,
    seconds_of_process,
    worker_main,
)
from rlhf_lightning.app.build import computing, make_module
from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.models.gpu_kernels import fused_parts
from rlhf_lightning.models.memory import activation_bytes, update_bytes
from rlhf_lightning.models.micro_batching import token_budget
from rlhf_lightning.modules.ppo import PPOModule


class Watch(L.Callback):
    """Notes the time, the phases and the optimizer steps of every iteration."""

    def __init__(self, device: str) -> None:
        self.watch, self.steps = Stopwatch(device), StepCounter()
        self.iterations: list[dict[str, float]] = []
        self.started = self.first_rollout = 0.0
        self.peak = self.planned = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self.steps.watch(trainer.optimizers[0])
        self.watch.mark()
        self.started = seconds_of_process()
        if self.watch.device == "cuda":
            self.planned = planned_bytes(pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Take the lap, and the module's own phases."""
        self.watch.mark()
        measured = {name: float(value) for name, value in trainer.callback_metrics.items()}
        rollout = outputs["rollout"]
        lap = self.watch.laps()[-1] | {
            phase: measured[f"time/{phase}"] for phase in ("generate", "score", "update")
        }
        self.first_rollout = self.first_rollout or self.started + lap["generate"]
        # Before Lightning moves weights and Adam's state to host memory.
        self.peak = memory_bytes("VmHWM")
        lap["optimizer_steps"] = self.steps.count - sum(
            lap["optimizer_steps"] for lap in self.iterations
        )
        lap["prompt_tokens"] = int(batch.attention_mask.sum())
        lap["response_tokens"] = int(rollout.response_mask.sum())
        self.iterations.append(lap)


class ProfiledPPO(PPOModule):
    """PPOModule that profiles the updates of its last iteration."""

    profiler: torch.profiler.profile

    def collect_rollout(self, prompts: PromptBatch, iteration: int) -> Any:
        """Start the profiler once the rollout is there."""
        collected = super().collect_rollout(prompts, iteration)
        self.profiler = torch.profiler.profile()
        self.profiler.start()
        return collected

    def training_step(self, prompts: PromptBatch, batch_idx: int) -> dict[str, Any]:
        """Stop it when the updates are done and their metrics are logged."""
        outputs = super().training_step(prompts, batch_idx)
        self.profiler.stop()
        return outputs


def run(task: Task) -> dict[str, Any]:
    """Run the task's iterations; return the measured ones, in order."""
    workload = Workload(**task["workload"])
    tokenizer: Any = AutoTokenizer.from_pretrained(
        Path(task["folder"], "tokenizer"), padding_side="left"
    )
    total, profiled = task["warmup"] + task["iterations"], task.get("profile", False)
    batches: Any = [prompt_batch(workload, len(tokenizer), tokenizer, i) for i in range(total)]
    module: Any = ppo_module(task, workload, tokenizer)
    if profiled:
        module.__class__ = ProfiledPPO  # a configuration builds classes of the package alone
    watch = Watch(task["device"])
    trainer = bare_trainer(task, watch)
    settings = training_settings("ppo", *task["overrides"]).model
    with computing(settings.model_copy(update={"cpu_threads": task["threads"]})):
        trainer.fit(module, DataLoader(batches, batch_size=None))
    result: dict[str, Any] = {
        "iterations": watch.iterations[task["warmup"] :],
        "first_rollout": watch.first_rollout,
        "peak": watch.peak,
        "planned": watch.planned,
    }
    if profiled:
        result["profile"] = profile_rows(module.profiler)
    return result


def planned_bytes(module: Any) -> int:
    """Return the peak of an update by the formula that bounds its micro-batches."""
    model = module.policy.model
    each = activation_bytes(model.config, "mixed", fused=fused_parts(model))
    held = torch.cuda.memory_allocated() + update_bytes(module.roots, "mixed")
    return held + token_budget() * each


def prompt_batch(
    workload: Workload, vocabulary: int, tokenizer: Any, iteration: int
) -> PromptBatch:
    """Return the prompts of an iteration."""
    rows = prompt_rows(workload, vocabulary, iteration)
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    first = iteration * len(rows)
    return PromptBatch(
        input_ids=ids,
        attention_mask=torch.arange(width) >= width - lengths.unsqueeze(-1),
        row_ids=torch.arange(first, first + len(rows)),
        domains=("",) * len(rows),
        columns={"prompt": tuple(tokenizer.batch_decode(rows))},
    )


def ppo_module(task: Task, workload: Workload, tokenizer: Any) -> PPOModule:
    """Return the module that `+experiment=ppo` makes, on the folder's models."""
    folder = task["folder"]
    # A number of rows is the default on a CPU alone.
    rows = "null" if task["device"] == "cuda" else workload.micro_batch_size
    settings = training_settings(
        "ppo",
        f"trainer.precision={PRECISIONS[task['precision']]}",
        f"artifacts.sft={folder}/policy",
        f"artifacts.reward={folder}/reward",
        f"module.ppo.num_ppo_epochs={workload.num_ppo_epochs}",
        "module.ppo.num_minibatches=1",
        f"module.ppo.micro_batch_size={rows}",
        "module.ppo.learning_rate=1.0e-6",
        "module.ppo.value_learning_rate=1.0e-6",
        f"module.sampling.max_new_tokens={workload.new_tokens}",
        *task["overrides"],
    )
    module: PPOModule = make_module(settings)
    module.tokenizer = tokenizer
    module.generator = settings.rollout.build()((), PAD)  # nothing stops: responses are full
    return module


def profile_rows(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    """Return the operators that took most of the time, with their share of it."""
    on_device = torch.cuda.is_available()
    key = "self_device_time_total" if on_device else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda e: getattr(e, key), reverse=True)
    total = sum(getattr(event, key) for event in events)
    return [
        {"operator": e.key, "share": getattr(e, key) / total, "calls": e.count} for e in events[:15]
    ]


if __name__ == "__main__":
    worker_main(run)
