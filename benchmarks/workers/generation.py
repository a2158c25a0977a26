"""Rollout tokens a second: this project's generator, or plain `generate`, in bf16."""

from __future__ import annotations

import benchmarks.as_trained  # noqa: F401  (before torch loads)

# isort: split

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

from benchmarks.configured import training_settings
from benchmarks.shapes import EOS, PAD, spread, token_rows
from benchmarks.worker import Stopwatch, Task, worker_main
from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.rollout.generators.base import Generator
from rlhf_lightning.rollout.noise import RowNoise

STOP = 0  # the first word of the vocabulary: a uniform number of 0 always samples it


@dataclass(frozen=True)
class StopAfter(RowNoise):
    """Noise that stops each row at a length of its own, and no row earlier.

    Inverse-CDF sampling takes word 0 where the uniform number is 0; a number of at least 0.01
    never does, as a model with random weights gives no word one per cent.
    """

    lengths: tuple[int, ...] = ()

    def uniform(self, row_ids: Tensor, position: int | Tensor) -> Tensor:
        """Return 0 where a row stops, else a number in [0.01, 1)."""
        noise = 0.01 + 0.99 * super().uniform(row_ids, position)
        lengths = torch.tensor(self.lengths, device=row_ids.device)[row_ids]
        return torch.where(lengths == position + 1, 0.0, noise)


class StopAfterProcessor(LogitsProcessor):
    """The same for `generate`: word 0 gets all the probability at a row's end, none before."""

    def __init__(self, lengths: tuple[int, ...], prompt_length: int, device: str) -> None:
        self.last = torch.tensor(lengths, device=device) + prompt_length - 1

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `scores` `[B, V]` with the column of word 0 set."""
        scores[:, STOP] = torch.where(self.last == input_ids.shape[1], 1e4, -1e4)
        return scores


def run(task: Task) -> dict[str, Any]:
    """Generate `repeats` times after one warm-up; return seconds and tokens of each."""
    device, rows = task["device"], task["rows"]
    lengths = (
        tuple(spread(task["shortest"], task["longest"], rows, seed=1))
        if task["ragged"]
        else (task["longest"],) * rows
    )
    batch = prompt_batch(task, device)
    generate = {"ours": ours, "autocast": plain, "bf16 weights": plain}[task["engine"]](
        task, batch, lengths
    )
    watch, laps = Stopwatch(device), []
    for number in range(1 + task["iterations"]):
        with torch.autocast(device, torch.bfloat16, enabled=task["engine"] != "bf16 weights"):
            started = watch.now()
            mask = generate(number)
            seconds = watch.now() - started
        if mask.sum(-1).tolist() != list(lengths):
            raise RuntimeError(f"responses have {mask.sum(-1).tolist()} tokens, wanted {lengths}")
        laps.append({"seconds": seconds, "tokens": sum(lengths)})
    return {"iterations": laps[1:]}


def prompt_batch(task: Task, device: str) -> PromptBatch:
    """Return the prompts, padded on the left."""
    shortest, longest = task["prompt"]
    lengths = spread(shortest, longest, task["rows"], seed=0)
    rows = token_rows(lengths, task["vocabulary"], seed=0)
    width = max(lengths)
    return PromptBatch(
        input_ids=torch.tensor([[PAD] * (width - len(row)) + row for row in rows]),
        attention_mask=torch.arange(width) >= width - torch.tensor(lengths).unsqueeze(-1),
        row_ids=torch.arange(len(rows)),
        domains=("",) * len(rows),
        columns={"prompt": ("",) * len(rows)},
    ).to(device)


def ours(task: Task, batch: PromptBatch, lengths: tuple[int, ...]) -> Callable[[int], Tensor]:
    """Return a function that generates with this project's default engine."""
    model: Any = load_policy(Path(task["folder"], "policy")).model.to(task["device"]).eval()
    rollout = training_settings("ppo", *task["overrides"]).rollout
    generator: Generator = rollout.build()((STOP,) if task["ragged"] else (), PAD)

    def generate(number: int) -> Tensor:
        noise: RowNoise = RowNoise(1).at_iteration(number)
        if task["ragged"]:
            noise = StopAfter(1, iteration=number, lengths=lengths)
        return generator(
            model, batch, noise=noise, temperature=1.0, max_new_tokens=max(lengths)
        ).response_mask

    return generate


def plain(task: Task, batch: PromptBatch, lengths: tuple[int, ...]) -> Callable[[int], Tensor]:
    """Return a function that generates with transformers' `generate`."""
    dtype = torch.bfloat16 if task["engine"] == "bf16 weights" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(Path(task["folder"], "policy"), dtype=dtype)
    model = model.to(task["device"]).eval()
    # Nothing may be filled in from the checkpoint's own settings.
    model.generation_config = GenerationConfig(pad_token_id=EOS, eos_token_id=None)
    config = GenerationConfig(
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        max_new_tokens=max(lengths),
        eos_token_id=STOP if task["ragged"] else None,
        pad_token_id=EOS,
    )
    width = batch.input_ids.shape[1]
    stops = StopAfterProcessor(lengths, width, task["device"])
    processors = LogitsProcessorList([stops] if task["ragged"] else [])

    def generate(number: int) -> Tensor:
        torch.manual_seed(number)
        with torch.no_grad():
            sequences = model.generate(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask.long(),
                generation_config=config,
                logits_processor=processors,
            )
        responses = sequences[:, width:]
        # A row ends with its first stop word; without one it has full length.
        stopped = (responses == STOP) & torch.tensor(task["ragged"], device=responses.device)
        return stopped.long().cumsum(-1) - stopped.long() == 0

    return generate


if __name__ == "__main__":
    worker_main(run)
