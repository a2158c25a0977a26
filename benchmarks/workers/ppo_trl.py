"""PPO iterations of TRL 1.12, the last release with a PPO trainer; runs in the peer's environment.

Nothing of TRL is changed: two of its functions are wrapped to note when they start and end.
"""

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
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from benchmarks.shapes import Workload
from benchmarks.shapes import prompts as prompt_rows
from benchmarks.worker import StepCounter, Stopwatch, Task, seconds_of_process, worker_main


class Watch(TrainerCallback):
    """Notes the time, the phases and the optimizer steps of every iteration.

    Generation is TRL's `batch_generation`; the update begins with the first forward that has a
    graph and lasts to the end of the iteration; scoring is what lies between.
    """

    def __init__(self, device: str) -> None:
        self.watch, self.steps = Stopwatch(device), StepCounter()
        self.iterations: list[dict[str, float]] = []
        self.generated = self.updating = 0.0
        self.generate_seconds = self.first_rollout = 0.0
        generation, forward = ppo_trainer.batch_generation, ppo_trainer.forward

        def timed_generation(*arguments: Any, **options: Any) -> Any:
            started = self.watch.now()
            result = generation(*arguments, **options)
            self.generated = self.watch.now()
            self.generate_seconds = self.generated - started
            self.first_rollout = self.first_rollout or seconds_of_process()
            return result

        def timed_forward(*arguments: Any, **options: Any) -> Any:
            if torch.is_grad_enabled() and not self.updating:
                self.updating = self.watch.now()
            return forward(*arguments, **options)

        ppo_trainer.batch_generation, ppo_trainer.forward = timed_generation, timed_forward

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self.watch.mark()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Take the lap: TRL calls this once an iteration."""
        self.watch.mark()
        lap = self.watch.laps()[-1] | {
            "generate": self.generate_seconds,
            "score": self.updating - self.generated,
            "update": self.watch.marks[-1][0] - self.updating,
            "optimizer_steps": self.steps.count
            - sum(lap["optimizer_steps"] for lap in self.iterations),
        }
        self.updating = 0.0
        self.iterations.append(lap)


class InOrder:
    """Collator that hands out our batches in our order, whatever the loader has shuffled."""

    def __init__(self, batches: list[list[list[int]]], tokenizer: Any) -> None:
        self.batches, self.tokenizer, self.count = batches, tokenizer, 0

    def __call__(self, features: list[Any]) -> Any:
        """Return the next batch, padded on the left as TRL's own collator does."""
        rows = self.batches[self.count % len(self.batches)]
        self.count += 1
        return self.tokenizer.pad({"input_ids": rows}, return_tensors="pt")


def run(task: Task) -> dict[str, Any]:
    """Run the task's iterations; return the measured ones, in order."""
    workload = Workload(**task["workload"])
    folder = Path(task["folder"])
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "tokenizer", padding_side="left")
    total = task["warmup"] + task["iterations"]
    # Never the last batch of the data: there accelerate steps once a micro-batch.
    batches = [prompt_rows(workload, len(tokenizer), i) for i in range(total + 2)]
    watch = Watch(task["device"])
    with tempfile.TemporaryDirectory() as output:
        trainer = PPOTrainer(
            args=config(task, workload, total, output),
            processing_class=tokenizer,
            model=AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32),
            ref_model=AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32),
            reward_model=classifier(folder),
            value_model=classifier(folder),
            train_dataset=Dataset.from_dict(
                {"input_ids": [row for rows in batches for row in rows]}
            ),
            eval_dataset=Dataset.from_dict({"input_ids": batches[0]}),
            data_collator=InOrder(batches, tokenizer),
            callbacks=[watch],
        )
        wanted = {"fp32": "no", "bf16": "bf16"}[task["precision"]]
        if trainer.accelerator.mixed_precision != wanted:
            raise RuntimeError(
                f"TRL runs in mixed_precision={trainer.accelerator.mixed_precision}, wanted "
                f"{wanted}: start this process with ACCELERATE_MIXED_PRECISION={wanted}"
            )
        watch.steps.watch(trainer.optimizer.optimizer)
        trainer.train()
    laps = watch.iterations[task["warmup"] :]
    for number, lap in enumerate(laps, task["warmup"]):
        lap["prompt_tokens"] = sum(map(len, batches[number]))
        lap["response_tokens"] = workload.num_prompts * workload.new_tokens
    return {
        "iterations": laps,
        "first_rollout": watch.first_rollout,
        "optimizer": type(trainer.optimizer.optimizer).__name__,
    }


def classifier(folder: Path) -> Any:
    """Return the reward model; the value model starts from it on both sides."""
    return AutoModelForSequenceClassification.from_pretrained(
        folder / "reward", num_labels=1, dtype=torch.float32
    )


def config(task: Task, workload: Workload, total: int, output: str) -> PPOConfig:
    """Return TRL's settings: its defaults, but for the workload and what only costs time."""
    micro_batches, rest = divmod(workload.num_prompts, workload.micro_batch_size)
    if rest:
        raise ValueError(f"{workload.micro_batch_size=} must divide {workload.num_prompts=}")
    return PPOConfig(
        output_dir=output,
        use_cpu=task["device"] == "cpu",
        bf16=task["precision"] == "bf16",
        gradient_checkpointing=False,
        per_device_train_batch_size=workload.micro_batch_size,
        gradient_accumulation_steps=micro_batches,
        num_mini_batches=1,
        num_ppo_epochs=workload.num_ppo_epochs,
        total_episodes=total * workload.num_prompts,
        response_length=workload.new_tokens,
        stop_token=None,
        temperature=1.0,
        kl_coef=0.05,
        learning_rate=1e-6,
        num_sample_generations=0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=1,
    )


if __name__ == "__main__":
    worker_main(run)
