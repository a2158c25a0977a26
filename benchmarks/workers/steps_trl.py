"""Optimizer steps of TRL's SFT and reward trainers, on the same rows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from benchmarks.ragged import Ragged, answers, pairs
from benchmarks.worker import StepCounter, Stopwatch, Task, worker_main


class Watch(TrainerCallback):
    """Notes the time of every optimizer step."""

    def __init__(self, device: str) -> None:
        self.watch, self.steps = Stopwatch(device), StepCounter()

    def on_train_begin(self, *_: Any, **options: Any) -> None:
        """Start the clock."""
        optimizer = options["optimizer"]
        self.steps.watch(getattr(optimizer, "optimizer", optimizer))
        self.watch.mark()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Take the lap."""
        self.watch.mark()


def run(task: Task) -> dict[str, Any]:
    """Run the task's steps; return the measured ones, in order."""
    ragged, watch = Ragged(**task["ragged"]), Watch(task["device"])
    build = {"sft": sft_trainer, "reward": reward_trainer}[task["stage"]]
    with tempfile.TemporaryDirectory() as output:
        trainer = build(task, ragged, common(task, ragged, output), watch)
        trainer.train()
    return {
        "iterations": watch.watch.laps()[task["warmup"] :],
        "optimizer_steps": watch.steps.count,
    }


def common(task: Task, ragged: Ragged, output: str) -> dict[str, Any]:
    """Return the settings of both trainers: TRL's defaults, but for what only costs time."""
    micro_batches, rest = divmod(ragged.rows, ragged.micro_batch_size)
    if rest:
        raise ValueError(f"{ragged.micro_batch_size=} must divide {ragged.rows=}")
    return {
        "output_dir": output,
        "use_cpu": task["device"] == "cpu",
        "bf16": task["precision"] == "bf16",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": ragged.micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "max_steps": task["warmup"] + task["iterations"],
        "train_sampling_strategy": task["sampling"],
        "max_length": None,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 1,
    }


def sft_trainer(task: Task, ragged: Ragged, settings: dict[str, Any], watch: Watch) -> Any:
    """Return TRL's SFT trainer; the last three quarters of each row are learnt."""
    steps = range(settings["max_steps"])
    rows = [row for step in steps for row in answers(ragged, task["vocabulary"], step)]
    data = {
        "input_ids": [ids for ids, _ in rows],
        "completion_mask": [[0] * n + [1] * (len(ids) - n) for ids, n in rows],
    }
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            Path(task["folder"], "policy"), dtype=torch.float32
        ),
        args=SFTConfig(completion_only_loss=True, padding_free=task["padding_free"], **settings),
        train_dataset=Dataset.from_dict(data),
        processing_class=AutoTokenizer.from_pretrained(Path(task["folder"], "tokenizer")),
        callbacks=[watch],
    )


def reward_trainer(task: Task, ragged: Ragged, settings: dict[str, Any], watch: Watch) -> Any:
    """Return TRL's reward trainer, with the centring that this project's default has."""
    steps = range(settings["max_steps"])
    both = [pair for step in steps for pair in pairs(ragged, task["vocabulary"], step)]
    data: dict[str, Any] = {
        "chosen_ids": [chosen for chosen, _ in both],
        "rejected_ids": [rejected for _, rejected in both],
        "length": [max(map(len, pair)) for pair in both],  # what `batch_rebalance` sorts by
    }
    return RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(
            Path(task["folder"], "reward"), num_labels=1, dtype=torch.float32
        ),
        # Its unused columns stay, or the sampler would not find the lengths.
        args=RewardConfig(center_rewards_coefficient=0.01, remove_unused_columns=False, **settings),
        train_dataset=Dataset.from_dict(data),
        processing_class=AutoTokenizer.from_pretrained(Path(task["folder"], "tokenizer")),
        callbacks=[watch],
    )


if __name__ == "__main__":
    worker_main(run)
