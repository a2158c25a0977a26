"""Kernels, bytes, operations and seconds of a PPO iteration on a GPU, by a roofline.

    python -m benchmarks.roofline 0.5b 1b 8b --out roofline.json

A phase takes the longest of its kernels, its host and, under FSDP2, what goes over NVLink
meanwhile (`benchmarks/gpu_phases.py`). Nothing of it was measured on CUDA: figures compare
programs, not machines.
"""

from __future__ import annotations

# isort: off
from benchmarks.fake_cuda import fake_cuda  # before torch
# isort: on

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_phases import (
    FP32,
    GPUS,
    HOST_SECONDS,
    KERNEL_SECONDS,
    LONGEST_PROMPT,
    LONGEST_RESPONSE,
    Model,
    Phases,
    seconds,
)
from rlhf_lightning.models.forward import micro_batches
from rlhf_lightning.models.micro_batching import micro_batching

TOKENS_APART = 128  # steps of a generation that are counted
LLAMA = {"model_type": "llama", "vocab_size": 128256}
MODELS = {
    "0.5b": Model(
        {
            "model_type": "qwen2",
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        }
    ),
    "1b": Model(
        LLAMA
        | {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
        }
    ),
    "8b": Model(
        LLAMA
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        gpus=8,
        prompts=256,
        micro_batch_size=4,
        checkpointing=True,
    ),
}


class Rollout(NamedTuple):
    """Lengths of the rows of one rank, in tokens."""

    prompts: Tensor
    responses: Tensor

    def part(self, rows: Tensor) -> Rollout:
        """Return some of the rows."""
        return Rollout(self.prompts[rows], self.responses[rows])

    def cut(self, micro_batch_size: int) -> list[tuple[int, int, int]]:
        """Return rows, width and response tokens of each micro-batch."""
        lengths = self.prompts + self.responses
        mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)
        found = []
        for rows in micro_batches(mask, micro_batch_size):
            width = -(-int(lengths[rows].max()) // 16) * 16
            found.append((len(rows), width, int(self.responses[rows].sum())))
        return found


def rollouts(model: Model, seed: int = 0) -> list[Rollout]:
    """Return a rollout a rank: log-normal lengths with a mean of about 470 tokens a row."""
    generator = torch.Generator().manual_seed(seed)

    def lengths(mean: float, std: float, least: int, most: int) -> Tensor:
        drawn = torch.empty(model.prompts).log_normal_(mean, std, generator=generator)
        return drawn.clamp(least, most).long()

    prompts = lengths(5.0, 0.6, 16, LONGEST_PROMPT)
    responses = lengths(5.6, 0.7, 8, LONGEST_RESPONSE)
    return [
        Rollout(prompts[rank :: model.gpus], responses[rank :: model.gpus])
        for rank in range(model.gpus)
    ]


def iteration(name: str) -> dict[str, Any]:
    """Return seconds of the phases of a PPO iteration by GPU, and counts that explain them."""
    model = MODELS[name]
    ranks = rollouts(model)
    with micro_batching("tokens"):  # lengths are on a CPU
        scored = _together([rank.cut(model.micro_batch_size) for rank in ranks])
        steps = [
            _together([_cut(rank, model, step) for rank in ranks])
            for step in range(model.num_minibatches)
        ]
    tokens, rows = list(_tokens(ranks[0])), len(ranks[0].prompts)
    prompt = int(ranks[0].prompts.sum()) // rows
    with fake_cuda():
        phases = Phases(model)
        prefill = phases.prefill(rows, prompt)
        result: dict[str, Any] = {
            "micro_batches": {
                "score": len(scored),
                "step": sum(map(len, steps)) / len(steps),
            }
        }
        for gpu in GPUS:
            generating = seconds(prefill, gpu)
            generating += sum(n * seconds(phases.token(*size), gpu) for size, n in tokens)
            # Two models with the head of a language model, two with a scalar one.
            forwards = (phases.score(*part, kind) for part in scored for kind in (False, True))
            scoring = 2 * sum(seconds(work, gpu) for work in forwards)
            scoring += seconds(phases.advantages(rows), gpu)
            updating = sum(_step_seconds(phases, parts, gpu) for parts in steps)
            result[gpu] = {
                "generate": round(generating, 2),
                "score": round(scoring, 2),
                "update": round(updating * model.num_epochs, 2),
            }
    return result


def _tokens(rollout: Rollout) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield (rows, columns) of some tokens, and how many are like it; rows leave as they end."""
    width, longest = int(rollout.prompts.max()), int(rollout.responses.max())
    for start in range(0, longest, TOKENS_APART):
        count = min(TOKENS_APART, longest - start)
        middle = start + count // 2
        yield (max(int((rollout.responses > middle).sum()), 1), width + middle), count


def _cut(rank: Rollout, model: Model, step: int) -> list[tuple[int, int, int]]:
    rows = torch.arange(step, len(rank.prompts), model.num_minibatches)
    return rank.part(rows).cut(model.micro_batch_size)


def _together(cuts: Sequence[list[tuple[int, int, int]]]) -> list[tuple[int, int, int]]:
    """Return the largest of what the ranks compute at one time; the first is repeated."""
    return [
        max((cut[index] if index < len(cut) else cut[0] for cut in cuts), key=lambda p: p[0] * p[1])
        for index in range(max(map(len, cuts)))
    ]


def _step_seconds(phases: Phases, parts: list[tuple[int, int, int]], gpu: str) -> float:
    total = 0.0
    for of_values in (False, True):
        for index, part in enumerate(parts):
            total += seconds(phases.update(*part, of_values, index == 0), gpu)
        total += seconds(phases.step(), gpu)
    return total


def counts(name: str) -> dict[str, dict[str, float]]:
    """Return what one of each phase is: a token of all rows, a micro-batch of 8 or 4 rows."""
    model = MODELS[name]
    rows, width, asked = model.micro_batch_size, 480, 300 * model.micro_batch_size
    prompts = model.prompts // model.gpus
    with fake_cuda():
        phases = Phases(model)
        work = {
            "token": phases.token(prompts, LONGEST_PROMPT + LONGEST_RESPONSE // 2),
            "score": phases.score(rows, width, asked, False),
            "update": phases.update(rows, width, asked, False, False),
            "advantages": phases.advantages(prompts),
        }
    return {
        phase: {
            "kernels": found["kernels"],
            "gigabytes": round(found["bytes"] / 1e9, 2),
            "teraflop": round(found["operations"] / 1e12, 3),
            "host_ms": round(found["kernels"] * HOST_SECONDS * 1e3, 1),
            **{f"{gpu}_ms": round(float(found[gpu]) * 1e3, 2) for gpu in GPUS},
        }
        for phase, found in work.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write what was found as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--counts", action="store_true", help="one of each phase alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    rates = {"fp32": FP32, "host_seconds": HOST_SECONDS, "kernel_seconds": KERNEL_SECONDS}
    found: dict[str, Any] = {"constants": {**GPUS, **rates}}
    for name in options.models:
        found[name] = {"counts": counts(name)}
        if not options.counts:
            found[name]["iteration"] = iteration(name)
        sys.stdout.write(f"{name} {json.dumps(found[name], indent=1)}\n")
        sys.stdout.flush()
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
